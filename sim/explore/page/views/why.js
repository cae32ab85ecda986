// Where a token's time goes, what more of each resource would change, and where every number comes from.
import { duration, number, share, signed, text } from "explore/figures.js";
import { html, memo, useState } from "explore/ui.js";

const COLOURS = {
  weights: "blue",
  kv: "sky",
  arithmetic: "vermillion",
  prompt_attention: "orange",
  experts: "green",
  collectives: "purple",
  host: "ink",
  prompts: "gold",
  queue: "grey",
  front_end: "pale",
};
const REST = ["yellow", "green", "purple", "sky", "orange", "gold"];
const WHAT = { tpot: "TPOT", ttft: "TTFT" };

/** Bars with their parts from the greatest on, the colour of a cause the same in all of them. */
function bars(explained) {
  return Object.entries(WHAT).flatMap(([name, label]) => {
    const found = explained[name];
    if (!found || !Object.keys(found.parts ?? {}).length) return [];
    return [
      [`${label}, mean`, found],
      ...(found.slowest && Object.keys(found.slowest.parts ?? {}).length
        ? [[`${label}, ${found.slowest.label ?? "slowest 1 %"}`, found.slowest]]
        : []),
    ];
  });
}

/** A share that is less in every bar is not shown: rounding, mostly. */
const LEAST = 1e-4;

function colours(all, causes) {
  const total = {};
  for (const [, bar] of all)
    for (const [cause, seconds] of Object.entries(bar.parts))
      total[cause] = Math.max(total[cause] ?? 0, seconds / (bar.mean_s || 1));
  const names = Object.keys(total)
    .filter((name) => total[name] >= LEAST)
    .sort((a, b) => total[b] - total[a]);
  let next = 0;
  return names.map((name) => ({
    name,
    label: causes.find((each) => each.name === name)?.label ?? "",
    colour: COLOURS[name] ?? REST[next++ % REST.length],
  }));
}

const plain = (name) => name.replaceAll("_", " ");

function Shares({ explained }) {
  const all = bars(explained);
  const causes = colours(all, explained.causes ?? []);
  if (!all.length) return html`<p class="empty">No request has a latency to divide.</p>`;
  return html`
    <div class="stacks" aria-hidden="true">${all.map(
      ([label, bar]) =>
        html`<div class="stack"><span>${label} <b>${duration(bar.mean_s)}</b></span><div>${causes
          .filter((cause) => bar.parts[cause.name] > 0)
          .map((cause) => {
            const part = bar.parts[cause.name] / bar.mean_s;
            return html`<i style="flex:${part};--c:var(--${cause.colour})" class=${`on-${cause.colour}`}
              title=${`${plain(cause.name)}: ${duration(bar.parts[cause.name])}, ${share(part)}`}>${part > 0.08 ? `${Math.round(100 * part)} %` : ""}</i>`;
          })}</div></div>`,
    )}</div>
    <div class="scroll flat" tabindex="0" role="region" aria-label="Shares of latency by cause"><table class="causes"><thead><tr>
      <th scope="col">Cause</th>${all.map(([label]) => html`<th scope="col">${label}</th>`)}</tr></thead>
      <tbody>${causes.map((cause) => html`<tr><th scope="row"><i style="background:var(--${cause.colour})" />
        ${plain(cause.name)}<small>${cause.label}</small></th>${all.map(([, bar]) => html`<td>
        ${bar.parts[cause.name] ? html`${duration(bar.parts[cause.name])} <span>
        ${share(bar.parts[cause.name] / bar.mean_s)}</span>` : "–"}</td>`)}</tr>`)}</tbody>
      <tfoot><tr><th scope="row">Mean</th>${all.map(([, bar]) => html`<td>${duration(bar.mean_s)}</td>`)}</tr></tfoot></table></div>`;
}

const WAYS = [
  ["tpot_share", "TPOT"],
  ["ttft_share", "TTFT"],
  ["e2el_share", "E2EL"],
];

function WhatIfs({ rows, done }) {
  const most = Math.max(0.01, ...rows.flatMap((row) => WAYS.map(([name]) => Math.abs(row[name] ?? 0))));
  const ways = WAYS.filter(([name]) => rows.some((row) => name in row));
  const bar = (value) =>
    typeof value === "number"
      ? html`<span class="diverging"><i class=${value < 0 ? "less" : "more"} style="width:${(50 * Math.abs(value)) / most}%" />
        </span> <b>${signed(value, share)}</b>`
      : "–";
  return html`<h3 class="later">A tenth more of one resource</h3>
    <p>${done ? "Each was found by running it." : `Runs are under way, ${rows.length} done.`} Less is better.</p>
    ${
      rows.length > 0 &&
      html`<div class="scroll" tabindex="0" role="region" aria-label="What a tenth more would change"><table class="whatifs">
        <thead><tr><th scope="col">What</th>${ways.map(([, label]) => html`<th scope="col">${label} changes by</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr><th scope="row">${row.name}</th>${ways.map(([name]) => html`<td>
        ${bar(row[name])}</td>`)}</tr>`)}</tbody></table></div>`
    }`;
}

const KINDS = {
  measured: "measured",
  fitted: "fitted",
  borrowed: "borrowed from another device",
  datasheet: "datasheet",
  assumed: "assumed",
};

function Sources({ sources }) {
  const [kind, setKind] = useState(null);
  const kinds = Object.keys(KINDS).filter((name) => sources.some((each) => each.kind === name));
  const shown = sources.filter((each) => !kind || each.kind === kind);
  const value = (each) =>
    each.value === null || each.value === undefined || typeof each.value === "object"
      ? ""
      : typeof each.value === "number" && each.unit !== "s"
        ? scaled(each.value, each.unit)
        : text(each.value, each.unit);
  return html`<section class="panel" aria-label="Where the numbers come from"><div class="panelhead">
    <h2>Where the numbers come from</h2><p>${number(sources.length)} numbers went into the run.</p></div>
    <div class="chips" role="group" aria-label="Kinds of source"><button type="button" aria-pressed=${kind === null}
      onClick=${() => setKind(null)}>all</button>${kinds.map((name) => html`<button type="button" class=${`kind ${name}`}
      aria-pressed=${kind === name} onClick=${() => setKind(kind === name ? null : name)}>
      ${KINDS[name]} ${sources.filter((each) => each.kind === name).length}</button>`)}</div>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of sources"><table class="sources"><thead><tr><th
      scope="col">Number</th><th scope="col">Value</th><th scope="col">Kind</th><th scope="col">Date</th><th scope="col" class="words">Source</th></tr></thead>
      <tbody>${shown.map((each) => html`<tr><th scope="row">${each.name}</th><td>${value(each)}</td><td><span
        class=${`kind ${each.kind}`}>${each.kind}</span></td><td>${each.date ?? "–"}</td><td class="words">${each.source}</td>
        </tr>`)}</tbody></table></div>
  </section>`;
}

/** 3.35 TB/s of 3.35e12 bytes/s. */
export function scaled(value, unit = "") {
  const size = Math.abs(value);
  const [factor, letter] =
    size >= 1e15 ? [1e15, "P"] : size >= 1e12 ? [1e12, "T"] : size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1, ""];
  return `${number(value / factor)} ${letter}${letter && /^[a-z]{3}/.test(unit.replace(/^bytes/, "B")) ? " " : ""}${unit.replace(/^bytes/, "B")}`.trimEnd();
}

export const Why = memo(({ explained, answer, waiting }) => {
  const found = explained?.explained;
  return html`<section class=${`panel ${waiting ? "stale" : ""}`} aria-label="Where the time goes">
      <div class="panelhead"><h2>Where the time goes</h2></div>
      ${found ? html`<p class="lead">${found.sentence}</p><${Shares} explained=${found} /><${WhatIfs} rows=${explained.whatIfs}
        done=${explained.done} />` : html`<p class="empty">${explained?.refused ?? "The run is being divided by cause."}</p>`}
      ${found && explained.refused && html`<p class="sentence">${explained.refused}</p>`}
    </section>
    ${answer?.trust?.sources?.length > 0 && html`<${Sources} sources=${answer.trust.sources} />`}`;
});
