// Latency and goodput against load, with the SLO, the knee, and measured points.
import { Plot } from "explore/charts/plot.js";
import { share, signed } from "explore/figures.js";
import { brush, open } from "explore/session.js";
import { limits, rules } from "explore/slo.js";
import { html, memo, useMemo } from "explore/ui.js";

const CHARTS = [
  { title: "Time to first token", limit: "ttft_s", unit: "s", log: true, y: "TTFT", lines: [["ttft_p50_s", "p50", "sky"], ["ttft_p95_s", "p95", "blue"]] },
  { title: "Time per output token", limit: "tpot_s", unit: "s", log: true, y: "TPOT", lines: [["tpot_mean_s", "mean", "green"], ["tpot_p95_s", "p95", "blue"]] },
  { title: "End-to-end latency", limit: "e2e_s", unit: "s", log: true, y: "E2EL", lines: [["e2e_mean_s", "mean", "green"], ["e2e_p95_s", "p95", "blue"]] },
  { title: "Goodput", unit: "req/s", y: "Requests", lines: [["requests_per_s", "served", "sky"], ["goodput_per_s", "within SLO", "blue"]] },
];
const SHAPES = ["cross", "square", "triangle", "diamond"];

const column = (points, name) => points.map((point) => point.figures?.[name]?.value ?? null);
const rates = (points) => points.map((point) => point.rate_per_s);

/** Lines of one figure: what is exact in full, what is estimated or of the state before lighter. */
function linesOf(curve, [name, label, colour]) {
  const { points, before = [] } = curve;
  if (!points.some((point) => point.figures?.[name])) {
    const old = before.filter((point) => point.figures?.[name]);
    return old.length ? [{ type: "line", light: true, name: `${label}, state before`, colour, x: rates(old), y: column(old, name), silent: true }] : [];
  }
  const exact = points.filter((point) => point.kind === "exact");
  const rough = points.filter((point) => point.kind !== "exact");
  const banded = points.filter((point) => point.figures?.[name]?.low !== undefined);
  const dots = (some, more) => ({ type: "points", size: 3.2, colour, x: rates(some), y: column(some, name), picks: some.map((point) => point.set && (() => open(point.set))), ...more });
  return [
    ...(banded.length > 1 ? [{ type: "band", name: `${label}, interval`, colour, x: rates(banded), silent: true,
      low: banded.map((point) => point.figures[name].low), high: banded.map((point) => point.figures[name].high) }] : []),
    ...(rough.length ? [{ type: "line", light: true, silent: true, colour, x: rates(points), y: column(points, name) }, dots(rough, { name: `${label}, estimate`, hollow: true })] : []),
    ...(exact.length ? [{ type: "line", silent: true, colour, x: rates(exact), y: column(exact, name) }, dots(exact, { name: label })] : []),
  ];
}

function measured(benches, [name, label, colour], k) {
  return benches.flatMap((bench, b) => {
    const points = bench.points.filter((point) => typeof point.rate_per_s === "number" && typeof point.measured?.[name] === "number");
    return points.length ? [{
      type: "points", shape: SHAPES[b % SHAPES.length], size: 4.5, colour: k ? "vermillion" : "orange", name: `${label}, ${bench.name}`, x: rates(points),
      y: points.map((point) => point.measured[name]),
      notes: points.map((point) => (typeof point.error?.[name] === "number" ? `simulated ${signed(point.error[name], share)}` : "")),
    }] : [];
  });
}

function marksOf(curve, chart, benches, set) {
  return [
    ...chart.lines.flatMap((line) => linesOf(curve, line)),
    ...(typeof curve.knee === "number" ? [{ type: "rule", x: curve.knee, label: "knee", colour: "grey" }] : []),
    ...(typeof curve.arrival === "number" ? [{ type: "rule", x: curve.arrival, label: "this state", colour: "ink" }] : []),
    ...(chart.limit ? rules(limits(set), chart.limit, "y") : []),
    ...chart.lines.flatMap((line, k) => measured(benches, line, k)),
  ];
}

const X = { label: "Load", unit: "req/s" };

function One({ chart, curve, benches, range, set }) {
  const marks = useMemo(() => marksOf(curve, chart, benches, set), [chart, curve, benches, set]);
  const y = useMemo(() => ({ label: chart.y, unit: chart.unit, log: chart.log }), [chart]);
  return html`<${Plot} title=${chart.title} marks=${marks} x=${X} y=${y} height=${220} brush=${{ axes: "x", range, set: (to) => brush("rate", to) }}
    empty=${curve.refused ?? (curve.done ? "No point of the curve has this figure." : "The curve is being computed.")} />`;
}

const EMPTY = { points: [], before: [], done: false };

export const Load = memo(({ curve, benches, range, set, waiting }) => {
  const shown = curve ?? EMPTY;
  const count = shown.points.length;
  return html`<section class="panel" aria-label="Latency against load">
    <div class="panelhead"><h2>Latency against load</h2>
      <p>${shown.refused ? html`<span class="sentence">${shown.refused}</span>` : waiting || !shown.done ? `Computing, ${count} points so far; lighter lines are estimates or of the state before.`
        : `${count} points.${typeof shown.knee === "number" ? ` The knee is at ${Number(shown.knee.toPrecision(3))} requests a second.` : ""} Click a point to open its run; drag to choose a range of load.`}</p></div>
    <div class="grid">${CHARTS.map((chart) => html`<${One} key=${chart.title} chart=${chart} curve=${shown} benches=${benches} range=${range} set=${set} />`)}</div>
  </section>`;
});
