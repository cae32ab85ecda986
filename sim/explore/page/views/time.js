// The run in time: queue, batch, KV, prefix hits and machines, with one axis of time.
import { Plot } from "explore/charts/plot.js";
import { brush, chosenRows } from "explore/session.js";
import { html, memo, useMemo } from "explore/ui.js";

const CHARTS = [
  {
    title: "Requests",
    y: { label: "Requests", unit: "" },
    lines: [
      ["running", "running", "blue"],
      ["queued", "queued", "vermillion"],
    ],
  },
  {
    title: "KV and prefix cache",
    y: { label: "Share", unit: "share", domain: [0, 1] },
    lines: [
      ["kv_used_share", "KV blocks in use", "blue"],
      ["prefix_hit_share", "prompt tokens found in cache", "green"],
    ],
  },
  {
    title: "Tokens",
    y: { label: "Tokens", unit: "tok/s" },
    lines: [
      ["prompt_tokens_per_s", "of prompts", "orange"],
      ["output_tokens_per_s", "of outputs", "blue"],
    ],
  },
  { title: "Machines", y: { label: "Machines", unit: "" }, lines: [["machines", "serving", "purple"]] },
];

/** Whether a series is worth a chart: a fleet that never changes has none. */
const varies = (series, name) => name !== "machines" || new Set(series[name]).size > 1;

function One({ chart, series, light, range, times, x }) {
  const marks = useMemo(
    () => [
      ...chart.lines
        .filter(([name]) => series[name]?.some((value) => value !== null))
        .map(([name, label, colour]) => ({ type: "line", name: label, colour, light, x: series.time_s, y: series[name] })),
      ...(times
        ? [
            {
              type: "points",
              shape: "cross",
              size: 2,
              colour: "ink",
              silent: true,
              name: "chosen requests",
              x: times,
              y: times.map(() => 0),
            },
          ]
        : []),
    ],
    [chart, series, light, times],
  );
  return html`<${Plot} title=${chart.title} marks=${marks} x=${x} y=${chart.y} height=${140} numbers=${false} across=${true}
    brush=${{ axes: "x", range, set: (to) => brush("time", to) }} />`;
}

export const Time = memo(({ answer, brushes, requests }) => {
  const series = answer?.series;
  const x = useMemo(
    () => series?.time_s?.length && { label: "Time", unit: "s", domain: [series.time_s[0], series.time_s.at(-1) || 1] },
    [series],
  );
  // Requests chosen by their latency, when they came.
  const times = useMemo(() => {
    const rows = requests?.columns && chosenRows(requests.columns, { ...brushes, time: null });
    return rows && rows.map((row) => requests.columns.arrival_s[row]);
  }, [requests, brushes]);
  if (!x) return null;
  const charts = CHARTS.filter((chart) =>
    chart.lines.some(([name]) => series[name]?.some((value) => value !== null) && varies(series, name)),
  );
  return html`<section class="panel" aria-label="The run in time">
    <div class="panelhead"><h2>The run in time</h2>
      <p>Drag over a stretch of time: distributions and requests show those that came then.${times ? ` Small crosses: when the ${times.length} chosen requests came.` : ""}</p></div>
    <div class="grid one">${charts.map((chart) => html`<${One} key=${chart.title} chart=${chart} series=${series}
      light=${answer.kind === "estimate" || answer.rough} range=${brushes.time} times=${times} x=${x} />`)}</div>
  </section>`;
});
