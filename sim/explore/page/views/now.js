// A fleet that runs: what it has and does now, what is forecast, and what the policy would do next and why. The page only reads.
import { Plot } from "explore/charts/plot.js";
import { text } from "explore/figures.js";
import { html, memo, useMemo } from "explore/ui.js";

const NAMES = {
  machines: "Machines that answer",
  running: "Requests running",
  waiting: "Requests waiting",
  arrivals_per_s: "Requests that came",
  kv_used_share: "KV blocks in use",
};
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();

function Figures({ figures }) {
  const names = Object.keys(NAMES).filter((name) => figures[name]);
  return html`<dl class="figures">${names.map((name) => html`<div class="figure" key=${name}><dt>${NAMES[name]}</dt>
    <dd><strong>${text(figures[name].value, figures[name].unit)}</strong></dd></div>`)}</dl>`;
}

function Policy({ policy }) {
  return html`<section class="panel" aria-label="What the policy would do">
    <div class="panelhead"><h2>What ${policy.name} would do</h2><p>It is only computed: nothing is started or drained.</p></div>
    <p class="lead">${policy.does}</p>
    <ul class="differing">${policy.why.map((sentence) => html`<li key=${sentence}>${sentence}</li>`)}</ul>
    <p class="foot">It looks again at ${clock(policy.looks_again_s)}.</p>
  </section>`;
}

const Traffic = memo(({ fleet }) => {
  const { history, policy, now_s } = fleet;
  const marks = useMemo(() => {
    const minutes = (times) => times.map((at) => (at - now_s) / 60);
    const line = (name, colour, times, values, light) => ({ type: "line", name, colour, light, x: minutes(times), y: values });
    const forecast = policy?.forecast;
    const now = { type: "rule", x: 0, label: "now", colour: "ink", silent: true };
    return {
      rates: [
        line("came", "blue", history.time_s, history.rate_per_s),
        ...(forecast ? [line("forecast", "vermillion", forecast.time_s, forecast.rate_per_s, true)] : []),
        now,
      ],
      requests: [
        line("running", "blue", history.time_s, history.running),
        line("waiting", "vermillion", history.time_s, history.waiting),
        now,
      ],
      domain: [
        (history.time_s[0] - now_s) / 60 - 1e-6,
        Math.max(0.5, ((forecast?.time_s.at(-1) ?? now_s) - now_s) / 60),
      ],
    };
  }, [fleet]);
  const x = { label: "Time from now", unit: "min", domain: marks.domain };
  const rates = policy?.forecast ? "Requests a second, seen and forecast" : "Requests a second";
  return html`<section class="panel" aria-label="Traffic"><div class="panelhead"><h2>Traffic</h2>
    <p>By intervals of ${fleet.interval_s} s.</p></div><div class="grid">
    <${Plot} title=${rates} marks=${marks.rates} x=${x} y=${{ label: "Requests", unit: "req/s" }} height=${190} across=${true} />
    <${Plot} title="Requests in flight" marks=${marks.requests} x=${x} y=${{ label: "Requests", unit: "" }} height=${190}
      across=${true} /></div></section>`;
});

export function Now({ watch, fleet, unread }) {
  return html`
    ${unread && html`<p class="sentence" role="alert">${unread}. ${fleet ? "What follows is what was seen last." : ""}</p>`}
    <section class="panel" aria-label="The fleet now">
      <div class="panelhead"><h2>The fleet now</h2><p>${watch.where}${fleet?.serves ? `: ${fleet.serves}` : ""}</p></div>
      ${fleet?.figures && html`<${Figures} figures=${fleet.figures} />`}
      <p class="foot">${fleet ? `Read at ${clock(fleet.now_s)}. ${fleet.waits ?? ""}` : "It is being read."}</p>
    </section>
    ${fleet?.policy && html`<${Policy} policy=${fleet.policy} />`}
    ${fleet?.history && !fleet.policy && html`<p class="foot">The scenario has no autoscale, so that no policy decides here.</p>`}
    ${fleet?.history && html`<${Traffic} fleet=${fleet} />`}`;
}
