// The distribution of each latency over the requests of the run, and over those that are chosen.
import { Plot } from "explore/charts/plot.js";
import { number } from "explore/figures.js";
import { brush, chosenRows } from "explore/session.js";
import { limits, rules } from "explore/slo.js";
import { html, memo, useMemo } from "explore/ui.js";

const MEASURES = [
  ["ttft_s", "Time to first token", "TTFT"],
  ["tpot_s", "Time per output token", "TPOT"],
  ["e2e_s", "End-to-end latency", "E2EL"],
];
const Y = { label: "Requests at or below", unit: "share", domain: [0, 1] };

/** The empirical distribution of *values*, at most *most* points of it. */
export function ecdf(values, most = 400) {
  const sorted = values.filter((value) => Number.isFinite(value)).sort((a, b) => a - b);
  const every = Math.max(1, Math.floor(sorted.length / most));
  const kept = sorted
    .map((value, i) => [value, (i + 1) / sorted.length])
    .filter((_, i) => i % every === 0 || i === sorted.length - 1);
  return { x: kept.map((each) => each[0]), y: kept.map((each) => each[1]) };
}

function One({ name, title, label, answer, held, rows, columns, range, limit }) {
  const marks = useMemo(() => {
    const own = answer.distributions?.[name];
    const other = held?.answer?.distributions?.[name];
    const few = rows && columns?.[name] ? ecdf(rows.map((row) => columns[name][row])) : null;
    return [
      ...(other ? [{ type: "line", name: "A", colour: "orange", x: other.x, y: other.share }] : []),
      ...(own
        ? [
            {
              type: "line",
              name: other ? "this state" : "all requests",
              colour: few ? "faint" : "blue",
              light: answer.kind === "estimate" || answer.rough,
              x: own.x,
              y: own.share,
            },
          ]
        : []),
      ...(few?.x.length ? [{ type: "line", name: "chosen requests", colour: "blue", ...few }] : []),
      ...rules(limit, name, "x"),
    ];
  }, [name, answer, held, rows, columns, limit]);
  const x = useMemo(() => ({ label, unit: "s", log: true }), [label]);
  return html`<${Plot} title=${title} marks=${marks} x=${x} y=${Y} height=${220}
    brush=${{ axes: "x", range, set: (to) => brush(name, to) }} empty="No request has one." />`;
}

export const Distributions = memo(({ answer, brushes, requests, held, set }) => {
  const columns = requests?.columns ?? null;
  const rows = useMemo(() => columns && chosenRows(columns, brushes), [columns, brushes]);
  if (!answer?.distributions) return null;
  return html`<section class="panel" aria-label="Distributions">
    <div class="panelhead"><h2>Distributions</h2><p>
      ${rows ? `${number(rows.length)} of ${number(columns.arrival_s.length)} requests are chosen.` : "Drag over a range of latency to see when those requests came, and which they are."}</p></div>
    <div class="grid three">${MEASURES.map(([name, title, label]) => html`<${One} key=${name} name=${name} title=${title}
      label=${label} answer=${answer} held=${held} rows=${rows} columns=${columns} range=${brushes[name]} limit=${limits(set)} />`)}</div>
  </section>`;
});
