// Where the page begins.
import { App } from "./app.js";
import { onChange, page, start } from "./session.js";
import { restoreTheme } from "./theme.js";
import { html, render } from "./ui.js";

const draw = () => render(html`<${App} page=${{ ...page }} />`, document.getElementById("page"));

restoreTheme();
start();
draw();
onChange(draw);
