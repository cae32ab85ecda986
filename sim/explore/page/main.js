// Where the page begins.
import { App } from "explore/app.js";
import { onChange, page, start } from "explore/session.js";
import { restoreTheme } from "explore/theme.js";
import { html, render } from "explore/ui.js";

const draw = () => render(html`<${App} page=${{ ...page }} />`, document.getElementById("page"));

restoreTheme();
start();
draw();
onChange(draw);
