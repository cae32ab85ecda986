// Latency and goodput against load, with the SLO, the knee, and measured points.
import { frozen } from "explore/api.js";
import { Plot } from "explore/charts/plot.js";
import { share, signed } from "explore/figures.js";
import { brush, open } from "explore/session.js";
import { limits, rules } from "explore/slo.js";
import { html, memo, useMemo } from "explore/ui.js";

const CHARTS = [
  { title: "Time to first token", of: "ttft", shown: ["p50", "p95"], unit: "s", log: true, y: "TTFT" },
  { title: "Time per output token", of: "tpot", shown: ["mean", "p95"], unit: "s", log: true, y: "TPOT" },
  { title: "End-to-end latency", of: "e2e", shown: ["mean", "p95"], unit: "s", log: true, y: "E2EL" },
  {
    title: "Goodput",
    unit: "req/s",
    y: "Requests",
    lines: [
      ["requests_per_s", "served", "sky"],
      ["goodput_per_s", "within SLO", "blue"],
    ],
  },
];
const STATISTICS = { mean: "green", p50: "sky", p90: "orange", p95: "blue", p99: "purple" };

/** The lines of a chart: the usual statistics, and those that a measured file has. */
function linesFor(chart, benches) {
  if (chart.lines) return chart.lines;
  const has = (name) => benches.some((bench) => bench.points.some((point) => typeof point.measured?.[name] === "number"));
  return Object.entries(STATISTICS)
    .filter(([statistic]) => chart.shown.includes(statistic) || has(`${chart.of}_${statistic}_s`))
    .map(([statistic, colour]) => [`${chart.of}_${statistic}_s`, statistic, colour]);
}
const SHAPES = ["cross", "square", "triangle", "diamond"];

const column = (points, name) => points.map((point) => point.figures?.[name]?.value ?? null);
const rates = (points) => points.map((point) => point.rate_per_s);

/** Lines of one figure: what is exact in full, what is estimated or of the state before lighter. */
function linesOf(curve, [name, label, colour]) {
  const { points, before = [] } = curve;
  const old = before.filter((point) => point.figures?.[name]);
  const exact = points.filter((point) => point.kind === "exact");
  const rough = points.filter((point) => point.kind !== "exact");
  const banded = points.filter((point) => point.figures?.[name]?.low !== undefined);
  const dots = (some, more) => ({
    type: "points",
    size: 3.2,
    colour,
    x: rates(some),
    y: column(some, name),
    picks: frozen() ? undefined : some.map((point) => point.set && (() => open(point.set))),
    ...more,
  });
  return [
    ...(old.length ? [{ type: "line", light: true, silent: true, colour, x: rates(old), y: column(old, name) }] : []),
    ...(banded.length > 1
      ? [
          {
            type: "band",
            name: `${label}, interval`,
            colour,
            x: rates(banded),
            silent: true,
            low: banded.map((point) => point.figures[name].low),
            high: banded.map((point) => point.figures[name].high),
          },
        ]
      : []),
    ...(rough.length
      ? [
          { type: "line", light: true, silent: true, colour, x: rates(points), y: column(points, name) },
          dots(rough, { name: `${label}, estimate`, hollow: true }),
        ]
      : []),
    ...(exact.length
      ? [{ type: "line", silent: true, colour, x: rates(exact), y: column(exact, name) }, dots(exact, { name: label })]
      : []),
  ];
}

/** Measured points, each with a line to what is simulated in its place. */
function measured(benches, [name, label, colour]) {
  return benches.flatMap((bench, b) => {
    const points = bench.points.filter(
      (point) => typeof point.rate_per_s === "number" && typeof point.measured?.[name] === "number",
    );
    const ends = (pick) => points.map((point) => pick(point.measured[name], point.simulated?.[name] ?? point.measured[name]));
    return points.length
      ? [
          {
            type: "points",
            shape: SHAPES[b % SHAPES.length],
            size: 4.5,
            colour,
            low: ends(Math.min),
            high: ends(Math.max),
            name: `${label}, ${bench.name}`,
            legend: { name: bench.name, colour: "ink" },
            x: rates(points),
            y: points.map((point) => point.measured[name]),
            notes: points.map((point) =>
              typeof point.error?.[name] === "number" ? `simulated ${signed(point.error[name], share)}` : "",
            ),
          },
        ]
      : [];
  });
}

function marksOf(curve, chart, benches, set, key) {
  const here = curve.points.find((point) => point.key && point.key === key)?.rate_per_s;
  const lines = linesFor(chart, benches);
  return [
    ...lines.flatMap((line) => linesOf(curve, line)),
    ...(typeof curve.knee === "number" ? [{ type: "rule", x: curve.knee, label: "knee", colour: "grey" }] : []),
    ...(typeof here === "number" ? [{ type: "rule", x: here, label: "this state", colour: "ink" }] : []),
    ...(chart.of ? rules(limits(set), `${chart.of}_s`, "y") : []),
    ...lines.flatMap((line) => measured(benches, line)),
  ];
}

const X = { label: "Load", unit: "req/s" };

function One({ chart, curve, benches, range, set, at }) {
  const marks = useMemo(() => marksOf(curve, chart, benches, set, at), [chart, curve, benches, set, at]);
  const y = useMemo(() => ({ label: chart.y, unit: chart.unit, log: chart.log }), [chart]);
  return html`<${Plot} title=${chart.title} marks=${marks} x=${X} y=${y} height=${220}
    brush=${{ axes: "x", range, set: (to) => brush("rate", to) }}
    empty=${curve.refused ?? (curve.done ? "No point of the curve has this figure." : "The curve is being computed.")} />`;
}

const EMPTY = { points: [], before: [], done: false };

export const Load = memo(({ curve, benches, range, set, at, waiting }) => {
  const shown = curve ?? EMPTY;
  const count = shown.points.length;
  return html`<section class="panel" aria-label="Latency against load">
    <div class="panelhead"><h2>Latency against load</h2>
      <p>${
        shown.refused
          ? html`<span class="sentence">${shown.refused}</span>`
          : waiting || !shown.done
            ? `Computing, ${count === 1 ? "1 point" : `${count} points`} so far; dashed lines are estimates, or of the state before.`
            : `${count} points.${typeof shown.knee === "number" ? ` The knee is at ${Number(shown.knee.toPrecision(3))} requests a second.` : ""}${frozen() ? "" : " Click a point to open its run."} Drag to choose a range of load.`
      }</p></div>
    <div class="grid">${CHARTS.map((chart) => html`<${One} key=${chart.title} chart=${chart} curve=${shown} benches=${benches}
      range=${range} set=${set} at=${at} />`)}</div>
  </section>`;
});
