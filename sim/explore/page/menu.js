// Copy the state as a scenario, a command, the server's command, a manifest or a link.
import { update } from "explore/session.js";
import { html, useEffect, useRef, useState } from "explore/ui.js";

const WHAT = { scenario: "Scenario (YAML)", run: "Command of rooftrace", server: "Command of the server", manifest: "Manifest" };

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  throw new Error("no clipboard");
}

export function CopyMenu({ answer }) {
  const [open, setOpen] = useState(false);
  const [shown, setShown] = useState(null); // what could not be copied, to copy by hand
  const ref = useRef(null);
  useEffect(() => {
    if (!open) return undefined;
    const away = (event) => !ref.current.contains(event.target) && setOpen(false);
    addEventListener("pointerdown", away);
    return () => removeEventListener("pointerdown", away);
  }, [open]);
  const items = [
    ...Object.entries(WHAT)
      .filter(([name]) => answer?.commands?.[name])
      .map(([name, label]) => [label, answer.commands[name]]),
    ["Link to this page", location.href],
  ];
  const take = async ([label, text]) => {
    setOpen(false);
    ref.current.querySelector("button").focus();
    try {
      await copy(text);
      update({ said: `${label} copied.` });
    } catch {
      setShown(text);
    }
  };
  const keys = (event) => {
    if (event.key !== "Escape") return;
    setOpen(false);
    ref.current.querySelector("button").focus();
  };
  return html`<div class="menu" ref=${ref} onKeyDown=${keys}>
    <button type="button" aria-expanded=${open} aria-haspopup="true" disabled=${!answer} onClick=${() => setOpen(!open)}>Copy as …</button>
    ${open && html`<ul>${items.map((item) => html`<li><button type="button" onClick=${() => take(item)}>${item[0]}</button></li>`)}</ul>`}
    ${shown && html`<div class="byhand"><textarea aria-label="Text to copy" readonly rows="8" ref=${(area) => area?.select()}>
      ${shown}</textarea><button type="button" onClick=${() => setShown(null)}>Close</button></div>`}
  </div>`;
}
