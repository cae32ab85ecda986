// What stands above every view: how far to trust the answer, its main figures with their intervals, and what bounds the deployment.
import { frozen } from "explore/api.js";
import { difference, interval, judged, MAIN, nameOf, number, share, signed, text } from "explore/figures.js";
import { CopyMenu } from "explore/menu.js";
import { download, hold, release, update } from "explore/session.js";
import { html } from "explore/ui.js";
import { nextTheme, themeName } from "explore/theme.js";

export function Bar({ page }) {
  return html`<header class="bar">
    <h1><svg viewBox="0 0 16 16" width="20" height="20" aria-hidden="true"><path d="M1 13 7 5l8-1" fill="none"
      stroke="var(--blue)" stroke-width="2.4" /></svg>Rooftrace <span>explore</span></h1>
    <p class="scenario" title=${page.scenario}>${page.scenario}${frozen() ? " · a file, as it was when it was written" : ""}</p>
    <div class="actions">
      <${CopyMenu} answer=${page.answer} />
      ${
        !frozen() &&
        html`<button type="button" aria-pressed=${Boolean(page.held)} onClick=${() => (page.held ? release() : hold())}
          title="Keep this state as A and see each later one beside it">${page.held ? "Let A go" : "Hold as A"}</button>
      <button type="button" onClick=${download} title="This page as one HTML file, with its numbers">Export</button>`
      }
      <button type="button" onClick=${nextTheme} aria-label=${themeName()}
        title=${`${themeName()}; dark, light, or as the system says`}>◐</button>
    </div>
  </header>`;
}

/** A tier is told in words; its colour repeats them. */
const TIERS = { good: /your runs|as measured/, low: /no measurements|nothing held back|datasheet|not known/ };
const tierClass = (tier) => Object.keys(TIERS).find((name) => TIERS[name].test(tier)) ?? "fair";

/** The sentence of the trust where it does not begin with the tier, which stands before it. */
function withoutTier({ tier, sentence }) {
  const rest = sentence.startsWith(`${tier}; `) ? sentence.slice(tier.length + 2) : sentence;
  return rest && ended(rest[0].toUpperCase() + rest.slice(1));
}

function Figure({ name, figure, estimate, held }) {
  const range = interval(figure);
  const change = held && difference(held, figure);
  return html`<div class=${`figure ${estimate ? "estimate" : ""}`}>
    <dt>${figure.label ?? nameOf(name)}</dt>
    <dd><strong>${estimate ? html`<span aria-label="about">≈ </span>` : ""}${text(figure.value, figure.unit)}</strong>
      ${range && html`<span class="interval">${range}</span>`}
      ${change && html`<span class=${`change ${judged(name, change)}`}>${changeText(change, figure)} <span
        class="was">A ${text(held.value, held.unit)}</span></span>`}</dd>
  </div>`;
}

/** "+12 %" of a figure, points of a share, or the difference itself where A has 0. */
export function changeText(change, figure) {
  if (figure.unit === "share") return signed(change.value, (value) => `${Number((100 * value).toPrecision(2))} points`);
  if (change.share !== null) return signed(change.share, share);
  return signed(change.value, (value) => text(value, figure.unit));
}

const ended = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

function said({ kind, how, label }, waiting) {
  const what = label ? `${label}. ` : "";
  if (kind === "estimate") return `${what}${how}${waiting ? " The exact run is under way." : ""}`;
  return waiting ? "Running; the figures are those of the state before." : what + how;
}

export function Answer({ page }) {
  const { answer, refused, failed, held, waiting } = page;
  const estimate = answer?.kind === "estimate";
  const names = MAIN.filter((name) => answer?.figures[name]);
  return html`<section class="answer" aria-label="Answer" aria-busy=${waiting}>
    ${refused && html`<p class="sentence" role="alert">
      ${ended(refused.sentence)} ${answer ? "The figures are those of the state before." : ""}</p>`}
    ${failed && html`<p class="sentence" role="alert">${failed} <button type="button" class="quiet" aria-label="Dismiss"
      onClick=${() => update({ failed: null })}>✕</button></p>`}
    ${
      answer &&
      html`<div class="trustline">
      ${answer.trust && html`<span class=${`tier ${tierClass(answer.trust.tier)}`}><span class="unseen">Trust: </span>
        ${answer.trust.tier}</span>`}
      ${answer.slo && html`<span class=${`tier ${answer.slo.kept ? "good" : "low"}`}>
        ${answer.slo.kept ? "SLO holds" : `SLO missed: ${answer.slo.why}`}</span>`}
      ${answer.finished < answer.requests && html`<span class="tier low">
        ${number(answer.finished)} of ${number(answer.requests)} requests finished</span>`}
      ${answer.saturated && !answer.slo?.why.startsWith("saturated") && html`<span
        class="tier low">saturated: the queue still grows when arrivals end</span>`}
      ${answer.trust && html`<span class="trust">${withoutTier(answer.trust)}</span>`}
      <span class=${`state ${waiting ? "waiting" : ""}`}>${said(answer, waiting)}</span>
    </div>`
    }
    <dl class=${`figures ${refused || (waiting && !estimate) ? "stale" : ""}`}>${names.map((name) => html`<${Figure} key=${name}
      name=${name} figure=${answer.figures[name]} estimate=${estimate} held=${held?.answer?.figures[name]} />`)}</dl>
    <p class="bounds">${page.explained?.explained?.sentence ?? page.explained?.refused ?? html`<span class="was">
      ${answer && !refused ? "What bounds it is being found." : ""}</span>`}</p>
    ${answer?.notes?.length > 0 && html`<details class="notes"><summary>
      ${answer.notes.length} ${answer.notes.length === 1 ? "note" : "notes"}</summary><ul>${answer.notes.map((note) => html`<li>
      ${note}</li>`)}</ul></details>`}
    <p class="unseen" role="status" aria-live="polite">${page.said}</p>
  </section>`;
}
