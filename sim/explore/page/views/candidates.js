// Configurations: tokens a second per device against per user with the Pareto front, and a table by cost with the chance that the SLO holds.
import { Plot } from "explore/charts/plot.js";
import { frozen } from "explore/api.js";
import { choicesOf } from "explore/controls.js";
import { nameOf, number, share, text } from "explore/figures.js";
import { brush, open, page, vary } from "explore/session.js";
import { valueOf, valueText } from "explore/state.js";
import { SortHead, sorted } from "explore/table.js";
import { html, memo, useMemo, useState } from "explore/ui.js";

const X = { label: "Output per user", unit: "tok/s", afloat: true };
const Y = { label: "Output per device", unit: "tok/s", afloat: true };
const USER = "output_tokens_per_s_per_user";
const DEVICE = "output_tokens_per_s_per_device";
const COLUMNS = ["cost_per_hour", "cost_per_mtoken", "devices", "goodput_per_s", "ttft_p95_s", "tpot_mean_s", DEVICE, USER];

const value = (row, name) => row.figures?.[name]?.value ?? null;
const within = (one, range) => !range || (one !== null && one >= range[0] && one <= range[1]);
export const cost = (row) => value(row, "cost_per_hour") ?? value(row, "devices") ?? Infinity;

/** How probably a candidate holds the SLO: from replays, and where there are none whether its one run does. */
const holds = (row) => row.slo_probability ?? (row.slo ? Number(row.slo.kept) : 1);

/** Those whose run holds the SLO first, the cheapest on top; then the others, the cheapest on top; refused ones last. */
export function ranked(rows) {
  const rank = (row) => (row.refused ? 2 : (row.slo?.kept ?? holds(row) >= 0.5) ? 0 : 1);
  return [...rows].sort(
    (a, b) =>
      rank(a) - rank(b) ||
      cost(a) - cost(b) ||
      holds(b) - holds(a) ||
      (value(a, "cost_per_mtoken") ?? 0) - (value(b, "cost_per_mtoken") ?? 0),
  );
}

/** Whether a candidate lies in the ranges that are chosen: its own figures, and its goodput in the range of load. */
export function held(row, { front, rate }) {
  if (row.refused) return !front && !rate;
  return (
    (!front || (within(value(row, USER), front.x) && within(value(row, DEVICE), front.y))) &&
    within(value(row, "goodput_per_s") ?? value(row, "requests_per_s"), rate)
  );
}

const choose = (row) => open({ ...page.set, ...row.set });

function marksOf(rows, chosen, answer, light) {
  const drawn = rows.filter((row) => value(row, USER) !== null && value(row, DEVICE) !== null);
  const split = (some, more) =>
    some.length
      ? [
          {
            type: "points",
            x: some.map((row) => value(row, USER)),
            y: some.map((row) => value(row, DEVICE)),
            labels: some.map((row) => row.name),
            picks: frozen() ? undefined : some.map((row) => () => choose(row)),
            notes: some.map((row) => (typeof row.slo_probability === "number" ? `SLO ${share(row.slo_probability)}` : "")),
            light,
            ...more,
          },
        ]
      : [];
  const front = drawn.filter((row) => row.on_front).sort((a, b) => value(a, USER) - value(b, USER));
  const [inside, outside] = [drawn.filter((row) => chosen.has(row)), drawn.filter((row) => !chosen.has(row))];
  const own = answer?.figures ?? {};
  return [
    ...(front.length > 1
      ? [
          {
            type: "line",
            thin: true,
            name: "Pareto front",
            colour: "vermillion",
            x: front.map((row) => value(row, USER)),
            y: front.map((row) => value(row, DEVICE)),
            silent: true,
            light,
          },
        ]
      : []),
    ...split(outside, { name: "outside the range", colour: "faint", size: 3 }),
    ...split(
      inside.filter((row) => !row.on_front),
      { name: "dominated", colour: "blue", hollow: true },
    ),
    ...split(
      inside.filter((row) => row.on_front),
      { name: "on the front", colour: "vermillion", shape: "diamond" },
    ),
    ...(own[USER] && own[DEVICE]
      ? [
          {
            type: "points",
            shape: "cross",
            size: 5,
            colour: "ink",
            name: "this state",
            x: [own[USER].value],
            y: [own[DEVICE].value],
          },
        ]
      : []),
  ];
}

function Vary({ over, controls }) {
  const [key, setKey] = useState("");
  const [typed, setTyped] = useState("");
  const all = controls.groups.flatMap((group) => group.controls.map((each) => ({ ...each, group: group.name })));
  const each = all.find((one) => one.key === key);
  const choices =
    each?.kind === "boolean"
      ? [
          { value: true, label: "on" },
          { value: false, label: "off" },
        ]
      : each?.choices && choicesOf(each);
  const label = (name) => all.find((one) => one.key === name)?.label ?? name;
  const add = () => {
    const values = typed
      .split(",")
      .map((one) => one.trim())
      .filter(Boolean)
      .map(valueOf);
    if (key && values.length) vary(key, values);
    setTyped("");
  };
  const chosen = over[key] ?? [];
  const has = (one) => chosen.some((other) => JSON.stringify(other) === JSON.stringify(one));
  const toggle = (one) =>
    vary(key, has(one) ? chosen.filter((other) => JSON.stringify(other) !== JSON.stringify(one)) : [...chosen, one]);
  return html`<div class="vary">
    <label>Vary <select value=${key} onChange=${(event) => setKey(event.currentTarget.value)}>
      <option value="">layouts, counts and stacks that fit</option>
      ${controls.groups.map((group) => html`<optgroup label=${group.name}>${group.controls.map((one) => html`<option
        value=${one.key}>${one.label}</option>`)}</optgroup>`)}
    </select></label>
    ${
      choices
        ? html`<fieldset><legend class="unseen">Values of ${each.label}</legend>${choices.map((one) => html`<label><input
          type="checkbox" checked=${has(one.value)} onChange=${() => toggle(one.value)} /> ${one.label}</label>`)}</fieldset>`
        : key &&
          html`<label>Values <input type="text" value=${typed} placeholder="1, 2, 4"
            onInput=${(event) => setTyped(event.currentTarget.value)} onKeyDown=${(event) => event.key === "Enter" && add()} />
            </label> <button type="button" onClick=${add}>Add</button>`
    }
    ${Object.entries(over).map(([name, values]) => html`<span class="chip">
      ${label(name)}: ${values.map(valueText).join(", ")} <button type="button" class="quiet"
      aria-label=${`Vary ${label(name)} no more`} onClick=${() => vary(name, [])}>✕</button></span>`)}
  </div>`;
}

function Row({ row, columns }) {
  if (row.refused)
    return html`<tr class="out"><th scope="row">${row.name}</th><td colspan=${columns.length + 1}>${row.refused}</td></tr>`;
  return html`<tr>
    <th scope="row">${row.on_front ? html`<span class="front" role="img"
      aria-label="on the Pareto front">◆</span> ` : ""}${frozen() ? row.name : html`<button type="button" class="link"
      aria-label=${`Open ${row.name}`} onClick=${() => choose(row)}>${row.name}</button>`}</th>
    <td title=${row.slo_probability_from ?? row.slo_probability_why_not ?? row.slo?.why}>${
      typeof row.slo_probability === "number"
        ? html`<span class="meter"><i style="width:${100 * row.slo_probability}%" /></span>${share(row.slo_probability)}`
        : row.slo
          ? html`<span class="was">${row.slo.kept ? "in its run" : "not in its run"}</span>`
          : "–"
    }</td>
    ${columns.map((name) => html`<td>${row.figures[name] ? text(row.figures[name].value, row.figures[name].unit) : "–"}</td>`)}
  </tr>`;
}

const SHOWN = 40;

function told(candidates, rows, light) {
  if (candidates?.refused) return html`<span class="sentence">${candidates.refused}</span>`;
  if (light) return `Computing, ${number(candidates?.rows.length ?? 0)} so far.`;
  return `${number(rows.length)} configurations. Those whose run holds the SLO come first, the cheapest on top; beside them the share of
    replays that hold it.`;
}

export const Candidates = memo(({ candidates, over, controls, brush: brushes, waiting, answer }) => {
  const [sort, setSort] = useState(null);
  const [all, setAll] = useState(false);
  const rows = candidates?.rows.length ? candidates.rows : (candidates?.before ?? []);
  const light = waiting || !candidates?.done;
  const chosen = useMemo(() => new Set(rows.filter((row) => held(row, brushes))), [rows, brushes.front, brushes.rate]);
  const marks = useMemo(() => marksOf(rows, chosen, answer, light && rows === candidates?.before), [rows, chosen, answer, light]);
  const table = useMemo(() => {
    const some = rows.filter((row) => chosen.has(row));
    return sort ? sorted(some, sort, (row) => (sort.name === "slo" ? holds(row) : value(row, sort.name))) : ranked(some);
  }, [rows, chosen, sort]);
  const columns = COLUMNS.filter((name) => rows.some((row) => row.figures?.[name]));
  return html`<section class="panel" aria-label="Candidates">
    <div class="panelhead"><h2>Candidates</h2>
      <p>${told(candidates, rows, light)}</p></div>
    ${!frozen() && html`<${Vary} over=${over} controls=${controls} />`}
    <${Plot} title="Throughput against speed for a user" marks=${marks} x=${X} y=${Y} height=${340} numbers=${false} stale=${waiting}
      brush=${{ axes: "xy", range: brushes.front, set: (to) => brush("front", to) }} empty=${candidates?.refused ?? "Candidates are being computed."} />
    ${
      rows.length > 0 &&
      html`<div class=${`scroll flat ${rows === candidates.before ? "stale" : ""}`} tabindex="0" role="region"
        aria-label="Table of candidates"><table class="ranking">
      <thead><tr><th scope="col">Configuration</th>
        <${SortHead} name="slo" label="SLO holds" sort=${sort} setSort=${setSort} />
        ${columns.map((name) => html`<${SortHead} name=${name} label=${nameOf(name)} sort=${sort} setSort=${setSort} />`)}</tr></thead>
      <tbody>${table.slice(0, all ? undefined : SHOWN).map((row) => html`<${Row} key=${row.name} row=${row}
        columns=${columns} />`)}</tbody></table></div>
      <p class="foot">${number(table.length)} of ${number(rows.length)} shown${table.length > SHOWN && !all ? html` <button
        type="button" onClick=${() => setAll(true)}>All</button>` : ""}.</p>`
    }
  </section>`;
});
