// The whole page: the bar, the settings, the answer, and one of the views.
import { frozen } from "explore/api.js";
import { Controls } from "explore/controls.js";
import { Answer, Bar } from "explore/header.js";
import { addBench, brushed, clearBrushes, open, page as now, show } from "explore/session.js";
import { html, useEffect, useRef, useState } from "explore/ui.js";
import { Candidates } from "explore/views/candidates.js";
import { Compare } from "explore/views/compare.js";
import { Distributions } from "explore/views/distributions.js";
import { Load } from "explore/views/load.js";
import { Now } from "explore/views/now.js";
import { Requests } from "explore/views/requests.js";
import { SpeedUp } from "explore/views/speedup.js";
import { Time } from "explore/views/time.js";
import { Why } from "explore/views/why.js";
import { Yours } from "explore/views/yours.js";

const VIEWS = {
  now: "Now",
  answer: "Answer",
  requests: "Requests",
  why: "Why",
  speedup: "Speed-up against theory",
  yours: "Yours over ours",
  compare: "Two states",
};

function Tabs({ view, shown }) {
  const keys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = shown[(shown.indexOf(view) + step + shown.length) % shown.length];
    show(next);
    event.currentTarget.querySelector(`#tab-${next}`).focus();
  };
  const row = useRef(null);
  useEffect(() => {
    // On a phone the row of tabs is wider than the page.
    const chosen = row.current.querySelector(`#tab-${view}`);
    row.current.scrollLeft = chosen.offsetLeft - row.current.offsetLeft - 40;
  }, [view]);
  const tab = (name) => html`<button type="button" role="tab" id=${`tab-${name}`} aria-selected=${name === view} aria-controls="view"
    tabindex=${name === view ? 0 : -1} onClick=${() => show(name)}>${VIEWS[name]}</button>`;
  return html`<div class="tabs" role="tablist" aria-label="Views" ref=${row} onKeyDown=${keys}>${shown.map(tab)}</div>`;
}

function View({ page, view }) {
  if (view === "now") return html`<${Now} watch=${page.watch} fleet=${page.fleet} unread=${page.unread} />`;
  if (view === "requests")
    return html`<${Requests} answer=${page.answer} requests=${page.requests} brushes=${page.brush} opened=${page.request} />`;
  if (view === "why") return html`<${Why} explained=${page.explained} answer=${page.answer} waiting=${page.waiting} />`;
  if (view === "speedup") return html`<${SpeedUp} theory=${page.theory} waiting=${page.waiting} set=${page.set} />`;
  if (view === "yours")
    return html`<${Yours} benches=${page.benches} fit=${page.fit} />
    ${page.benches.length > 0 && html`<${Load} at=${page.answer?.key} curve=${page.curve} benches=${page.benches}
      range=${page.brush.rate} set=${page.set} waiting=${page.waiting} />`}`;
  if (view === "compare")
    return html`<${Compare} compared=${page.compared} held=${page.held} answer=${page.answer} set=${page.set} waiting=${page.waiting} />`;
  return html`
    <${Load} at=${page.answer?.key} curve=${page.curve} benches=${page.benches} range=${page.brush.rate} set=${page.set}
      waiting=${page.waiting} />
    <${Candidates} candidates=${page.candidates} over=${page.over} controls=${page.controls} brush=${page.brush}
      waiting=${page.waiting} answer=${page.answer} />
    <${Time} answer=${page.answer} brushes=${page.brush} requests=${page.requests} held=${page.held} />
    <${Distributions} answer=${page.answer} brushes=${page.brush} requests=${page.requests} held=${page.held} set=${page.set} />`;
}

export function App({ page }) {
  const [dropping, setDropping] = useState(false);
  const wide = useRef(matchMedia("(min-width: 900px)").matches);
  useEffect(() => {
    // A file may be dropped anywhere on the page.
    const over = (event) => {
      if (frozen() || !event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setDropping(true);
    };
    const away = (event) => !event.relatedTarget && setDropping(false);
    const drop = (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      setDropping(false);
      for (const file of event.dataTransfer.files) addBench(file);
      if (!["answer", "yours"].includes(now.view)) show("yours");
    };
    addEventListener("dragover", over);
    addEventListener("dragleave", away);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", over);
      removeEventListener("dragleave", away);
      removeEventListener("drop", drop);
    };
  }, []);
  const without = [
    ...(page.watch ? [] : ["now"]),
    ...(frozen() ? ["compare", ...(page.benches.length ? [] : ["yours"])] : []),
  ];
  const shown = Object.keys(VIEWS).filter((name) => !without.includes(name));
  const view = shown.includes(page.view) ? page.view : "answer";
  const changes = Object.keys(page.set).length;
  return html`
    <a class="skip" href="#view" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("view").focus();
    }}>To the view</a>
    <${Bar} page=${page} />
    <div class="columns">
      <aside aria-label="Settings">
        <details open=${wide.current}>
          <summary><h2>Settings</h2>${changes > 0 && html`<span class="count">${changes}<span class="unseen"> changed</span>
            </span>`}</summary>
          ${changes > 0 && !frozen() && html`<button type="button" class="reset"
            onClick=${() => open({})}>All back to the scenario</button>`}
          <${Controls} controls=${page.controls} set=${page.set} refused=${page.refused} />
        </details>
      </aside>
      <main>
        <${Answer} page=${page} />
        <${Tabs} view=${view} shown=${shown} />
        ${brushed() && html`<p class="chosen"><span>A range is chosen: the other views show what lies in it.</span> <button
          type="button" onClick=${clearBrushes}>Show all</button></p>`}
        <div id="view" role="tabpanel" aria-labelledby=${`tab-${view}`} tabindex="-1"><${View} page=${page} view=${view} /></div>
      </main>
    </div>
    ${dropping && html`<div class="dropping" aria-hidden="true">Drop a benchmark file: its points go over the curves</div>`}`;
}
