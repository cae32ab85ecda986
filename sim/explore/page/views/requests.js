// The requests of the run: when each came and how long it took, a table, and one request in detail.
import { frozen, timelineUrl } from "explore/api.js";
import { Plot } from "explore/charts/plot.js";
import { duration, number, share } from "explore/figures.js";
import { brush, chosenRows, page, update } from "explore/session.js";
import { SortHead, sorted } from "explore/table.js";
import { html, memo, useMemo, useState } from "explore/ui.js";

const COLUMNS = [
  ["request", "Request", String],
  ["arrival_s", "Arrival", duration],
  ["queued_s", "Queued", duration],
  ["ttft_s", "TTFT", duration],
  ["tpot_s", "TPOT", duration],
  ["e2e_s", "E2EL", duration],
  ["prompt_tokens", "Prompt (tokens)", number],
  ["output_tokens", "Output (tokens)", number],
  ["cached_tokens", "Found in cache (tokens)", number],
  ["preemptions", "Preempted (times)", number],
  ["machine", "Machine", String],
  ["slo_met", "Within SLO", (met) => (met ? "yes" : "no")],
];
const SHOWN = 50;
const X = { label: "Arrival", unit: "s" };
const Y = { label: "TTFT", unit: "s", log: true };

const openRow = (row) => update({ request: row });

function Detail({ columns, row }) {
  const at = (name) => columns[name]?.[row] ?? null;
  const [ttft, e2e, queued] = [at("ttft_s"), at("e2e_s"), at("queued_s") ?? 0];
  if (ttft === null || e2e === null) return html`<p>Request ${at("request")} was not finished.</p>`;
  const parts = [
    ["queued", queued, "grey"],
    ["prompt", Math.max(0, ttft - queued), "orange"],
    ["output", Math.max(0, e2e - ttft), "blue"],
  ].filter(([, seconds]) => seconds > 0);
  return html`<div class="detail" role="region" aria-label=${`Request ${at("request")}`}>
    <h3>Request ${at("request")} <button type="button" class="quiet" aria-label="Close the request"
      onClick=${() => openRow(null)}>✕</button></h3>
    <div class="bar-parts">${parts.map(([name, seconds, colour]) => html`<span style="flex:${seconds / e2e};--c:var(--${colour})"
      title=${`${name} ${duration(seconds)}`} />`)}</div>
    <ul class="legend">${parts.map(([name, seconds, colour]) => html`<li><i style="background:var(--${colour})" />
      ${name} ${duration(seconds)} (${share(seconds / e2e)})</li>`)}</ul>
    <p>${number(at("prompt_tokens"))} tokens of prompt${at("cached_tokens") ? `, ${number(at("cached_tokens"))} of them found in the cache` : ""}; ${number(at("output_tokens"))} tokens of output. It came at ${duration(at("arrival_s"))} and ended at ${duration(at("arrival_s") + e2e)}.</p>
  </div>`;
}

export const Requests = memo(({ answer, requests, brushes, opened }) => {
  const [sort, setSort] = useState(null);
  const [count, setCount] = useState(SHOWN);
  const columns = requests?.columns ?? null;
  const rows = useMemo(
    () => columns && (chosenRows(columns, brushes) ?? columns.arrival_s.map((_, row) => row)),
    [columns, brushes],
  );
  const table = useMemo(() => columns && sorted(rows, sort, (row) => columns[sort.name]?.[row]), [columns, rows, sort]);
  const marks = useMemo(() => {
    if (!columns) return [];
    const has = rows.filter((row) => columns.ttft_s[row] !== null);
    const met = has.filter((row) => columns.slo_met?.[row] !== false);
    const not = has.filter((row) => columns.slo_met?.[row] === false);
    const some = (list, more) =>
      list.length
        ? [
            {
              type: "points",
              size: 2.2,
              x: list.map((row) => columns.arrival_s[row]),
              y: list.map((row) => columns.ttft_s[row]),
              picks: list.map((row) => () => openRow(row)),
              notes: list.map((row) => `request ${columns.request?.[row] ?? row}`),
              ...more,
            },
          ]
        : [];
    return [
      ...some(met, { name: not.length ? "within the SLO" : "requests", colour: "blue" }),
      ...some(not, { name: "beyond the SLO", colour: "vermillion", shape: "triangle" }),
      ...(opened !== null && columns.ttft_s[opened] !== null
        ? some([opened], { name: "open", colour: "ink", shape: "diamond", size: 6, hollow: true })
        : []),
    ];
  }, [columns, rows, opened]);
  if (!columns)
    return html`<section class="panel"><h2>Requests</h2><p class="empty">
      ${requests?.missing ? "This file was written without its requests." : answer?.kind === "exact" ? "The requests are on their way." : "The exact run is under way; its requests follow."}</p></section>`;
  const shown = COLUMNS.filter(([name]) => columns[name]?.some((value) => value !== null));
  return html`<section class="panel" aria-label="Requests">
    <div class="panelhead"><h2>Requests</h2>
      <p>${number(rows.length)} of ${number(requests.total || columns.arrival_s.length)} requests${rows.length < columns.arrival_s.length ? ", those in the chosen ranges" : ""}.
      ${!frozen() && answer?.kind === "exact" && html` <a class="button" href=${timelineUrl(answer.key)}
        download="rooftrace-timeline.json">Timeline of requests and iterations for Perfetto</a>`}</p></div>
    <${Plot} title="Time to first token by arrival" marks=${marks} x=${X} y=${Y} height=${260} numbers=${false}
      brush=${{ axes: "x", range: page.brush.time, set: (to) => brush("time", to) }} />
    ${opened !== null && html`<${Detail} columns=${columns} row=${opened} />`}
    <div class="scroll" tabindex="0" role="region" aria-label="Table of requests"><table><thead><tr>
      ${shown.map(([name, label]) => html`<${SortHead} name=${name} label=${label} sort=${sort} setSort=${setSort} />`)}</tr></thead>
      <tbody>${table
        .slice(0, count)
        .map(
          (row) =>
            html`<tr key=${row} class=${row === opened ? "opened" : ""}>${shown.map(([name, , write], k) =>
              k
                ? html`<td>${columns[name][row] === null ? "–" : write(columns[name][row])}</td>`
                : html`<th scope="row"><button type="button" class="quiet" aria-label=${`Open request ${columns[name][row]}`}
                  onClick=${() => openRow(row)}>${columns[name][row]}</button></th>`,
            )}</tr>`,
        )}</tbody></table></div>
    ${table.length > count && html`<p class="foot">The first ${number(count)} are shown. <button type="button"
      onClick=${() => setCount(count + 200)}>200 more</button></p>`}
  </section>`;
});
