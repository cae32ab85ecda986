// Two states side by side: every figure of each, and the difference with its interval.
import { difference, FIGURES, interval, judged, nameOf, number, share, signed, text } from "explore/figures.js";
import { changeText } from "explore/header.js";
import { hold, open, page, release } from "explore/session.js";
import { valueText } from "explore/state.js";
import { html, memo } from "explore/ui.js";

const own = (key) => page.controls.groups.flatMap((group) => group.controls).find((each) => each.key === key);

/** The settings in which two states differ: `[key, in A, in B]`. */
export function differing(one, other) {
  const keys = [...new Set([...Object.keys(one), ...Object.keys(other)])];
  const at = (set, key) => (key in set ? set[key] : (own(key)?.value ?? null));
  return keys.map((key) => [key, at(one, key), at(other, key)]).filter(([, a, b]) => JSON.stringify(a) !== JSON.stringify(b));
}

const told = (value) => (value === null ? "not set" : valueText(value));

/** Latencies first, then the others as `FIGURES` has them. */
const order = (name) => Object.keys(FIGURES).indexOf(name);

/** The interval of a difference, in per cent of A or in points. */
function around({ low, high, unit }) {
  const write = (value) => signed(value, unit === "points" ? (each) => `${number(100 * each)} points` : share);
  return low === null ? "–" : `${write(low)} to ${write(high)}`;
}

export const Compare = memo(({ held, answer, set, compared, waiting }) => {
  if (!held) {
    return html`<section class="panel" aria-label="Two states"><div class="panelhead"><h2>Two states</h2></div>
      <p>Hold this state as A, then change settings: every figure of the new state stands beside A's, with the difference.</p>
      <p><button type="button" onClick=${() => hold()}>Hold this state as A</button></p></section>`;
  }
  const settings = differing(held.set, set);
  const names = Object.keys({ ...answer?.figures })
    .filter((name) => held.answer?.figures[name])
    .sort((a, b) => order(a) - order(b));
  const paired = compared?.differences ?? {};
  const cell = (figure) =>
    html`<td>${text(figure.value, figure.unit)}${interval(figure) && html`<br /><span class="was">${interval(figure)}</span>`}</td>`;
  return html`<section class=${`panel ${waiting ? "stale" : ""}`} aria-label="Two states">
    <div class="panelhead"><h2>Two states</h2><p>${settings.length ? "They differ in:" : "They are the same: change a setting."}</p></div>
    ${settings.length > 0 && html`<ul class="differing">${settings.map(([key, a, b]) => html`<li>
      ${own(key)?.label ?? key}: A ${told(a)}, now ${told(b)}</li>`)}</ul>`}
    <p><button type="button" onClick=${() => open(held.set)}>Go to A</button> <button type="button" onClick=${() => {
      const before = held.set;
      hold();
      open(before);
    }}>Swap</button> <button type="button" onClick=${release}>Let A go</button></p>
    ${
      names.length
        ? html`<div class="scroll flat" tabindex="0" role="region" aria-label="Figures of both states"><table class="compared">
          <thead><tr><th scope="col">Figure</th><th scope="col">A</th><th scope="col">Now</th><th scope="col">Difference</th><th
          scope="col">Its interval</th><th scope="col" class="words">Over the same requests</th></tr></thead>
      <tbody>${names.map((name) => {
        const [a, b] = [held.answer.figures[name], answer.figures[name]];
        const change = difference(a, b);
        return html`<tr><th scope="row">${b.label ?? nameOf(name)}</th>${cell(a)}${cell(b)}<td
          class=${`change ${judged(name, change)}`}>${changeText(change, b)}</td>${paired[name] ? html`<td>
          ${around(paired[name])}</td><td class="words">${paired[name].verdict}</td>` : html`<td>–</td><td />`}</tr>`;
      })}</tbody></table></div>
      <p class="foot">${compared?.refused ?? compared?.how ?? (settings.length ? "Intervals of the differences are being found." : "")}</p>`
        : html`<p class="empty">A is being run.</p>`
    }
  </section>`;
});
