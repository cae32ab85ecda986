// Speed-up against theory: the closed form as a line, the event loop as points over it.
import { Plot } from "explore/charts/plot.js";
import { extent } from "explore/charts/scale.js";
import { askTheory } from "explore/session.js";
import { html, memo, useEffect, useMemo, useState } from "explore/ui.js";

const VIEWS = { speculation: "Speculative decoding", chunks: "Chunk size", bubbles: "Pipeline bubbles", placement: "Placement" };
/** An axis that goes over as much is drawn in decades. */
const DECADES = 50;
const COLOURS = ["blue", "vermillion", "green", "purple", "orange", "sky", "gold"];
const SHAPES = ["circle", "square", "triangle", "diamond"];

function Lines({ found }) {
  const [marks, x, y] = useMemo(() => {
    // A theory and the runs of the same name have one colour.
    const plain = (name) => name.replace(/,? ?\(?(closed form|theory|simulated|event loop|runs?)\)?$/i, "");
    const names = [...new Set(found.lines.map((line) => plain(line.name)))];
    const both = found.lines.some((line) => line.kind === "theory") && found.lines.some((line) => line.kind === "simulated");
    const drawn = found.lines.flatMap((line) => {
      const k = names.indexOf(plain(line.name));
      const colour = COLOURS[k % COLOURS.length];
      const name =
        both && plain(line.name) === line.name
          ? `${line.name}, ${line.kind === "theory" ? "closed form" : "event loop"}`
          : line.name;
      if (line.kind === "theory") return [{ type: "line", thin: true, name, colour, x: line.x, y: line.y }];
      const points = {
        type: "points",
        name,
        colour,
        shape: SHAPES[k % SHAPES.length],
        size: 3.6,
        x: line.x,
        y: line.y,
        low: line.low,
        high: line.high,
      };
      return [...(both ? [] : [{ type: "line", colour, silent: true, x: line.x, y: line.y }]), points];
    });
    const [low, high] = extent(found.lines.map((line) => line.x)) ?? [0, 1];
    return [drawn, { ...found.x, log: low > 0 && high / low >= DECADES }, found.y];
  }, [found]);
  return html`<${Plot} title=${found.title} note=${found.note} marks=${marks} x=${x} y=${y} height=${300} />`;
}

export const SpeedUp = memo(({ theory, waiting, set }) => {
  const [view, setView] = useState("speculation");
  useEffect(() => {
    if (!waiting) askTheory(view);
  }, [view, waiting, set]);
  const found = theory[view];
  return html`<section class=${`panel ${waiting ? "stale" : ""}`} aria-label="Speed-up against theory">
    <div class="panelhead"><h2>Speed-up against theory</h2>
      <p>Thin lines are closed forms, points are runs of the event loop with their intervals.</p></div>
    <div class="chips" role="group" aria-label="What is compared">${Object.entries(VIEWS).map(([name, label]) => html`<button
      type="button" aria-pressed=${name === view} onClick=${() => setView(name)}>${label}</button>`)}</div>
    ${found?.refused && html`<p class="sentence">${found.refused}</p>`}
    ${!found?.refused && !found?.done && html`<p>Computing.</p>`}
    <div class="grid wide">${(found?.lines ?? []).map((each) => html`<${Lines} key=${each.title} found=${each} />`)}</div>
  </section>`;
});
