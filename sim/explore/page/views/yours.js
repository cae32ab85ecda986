// Measured runs beside the simulated ones: a dropped file, its points with their errors, and a fit to them.
import { frozen } from "explore/api.js";
import { FIGURES, nameOf, number, share, signed, text } from "explore/figures.js";
import { addBench, dropBench, fit } from "explore/session.js";
import { html, memo } from "explore/ui.js";

const STATISTIC = /^(ttft|tpot|e2e)_(mean|p\d+)_s$/;
const SECONDS = /_s$/;
const PER = /_per_/;
const unit = (name) =>
  PER.test(name) || !SECONDS.test(name)
    ? name.endsWith("_share")
      ? "share"
      : name.startsWith("output")
        ? "tok/s"
        : name.endsWith("per_s")
          ? "req/s"
          : ""
    : "s";

function Drop() {
  if (frozen()) return null;
  const take = (event) => {
    for (const file of event.currentTarget.files) addBench(file);
    event.currentTarget.value = "";
  };
  return html`<label class="drop">Drop a benchmark file on the page, or choose one<input type="file" multiple onChange=${take} />
    <span>Any file that <code>rooftrace bench</code> reads: results of vllm bench, SGLang's bench_serving, GuideLLM, AIPerf and others. It goes to the server of this page alone.</span></label>`;
}

function Fitted({ fitted: { before, after, runs, set_aside: aside, notes } }) {
  return html`<table class="fitted"><caption>Mean absolute error over ${runs} ${runs === 1 ? "run" : "runs"}</caption>
      <thead><tr><th scope="col">Figure</th><th scope="col">Before the fit</th><th scope="col">After it</th></tr></thead>
      <tbody>${Object.keys(after).map((name) => html`<tr><th scope="row">${nameOf(name)}</th><td>
        ${typeof before[name] === "number" ? share(before[name]) : "–"}</td><td>${share(after[name])}</td></tr>`)}</tbody></table>
    ${aside?.length > 0 && html`<p class="foot">Set aside, since they contradict the others: ${aside.join(", ")}.</p>`}
    ${notes?.map((note) => html`<p class="foot">${note}</p>`)}`;
}

function Bench({ bench, fitted }) {
  const names = [...new Set(bench.points.flatMap((point) => Object.keys(point.measured ?? {})))].filter(
    (name) => name in FIGURES || STATISTIC.test(name),
  );
  const load = (point) =>
    point.load ??
    (typeof point.rate_per_s === "number"
      ? `${number(point.rate_per_s)} req/s`
      : typeof point.concurrency === "number"
        ? `${number(point.concurrency)} at once`
        : "–");
  const size = (error) => (Math.abs(error) <= 0.1 ? "near" : Math.abs(error) <= 0.25 ? "" : "far");
  return html`<article class="bench"><h3>${bench.name} ${!frozen() && html`<button type="button" class="quiet"
    aria-label=${`Put ${bench.name} away`} onClick=${() => dropBench(bench.name)}>✕</button>`}</h3>
    <div class="scroll" tabindex="0" role="region" aria-label=${`Points of ${bench.name}`}><table><thead><tr><th
      scope="col">Load</th>${names.map((name) => html`<th scope="col">${nameOf(name)}</th>`)}</tr></thead>
      <tbody>${bench.points.map(
        (point) =>
          html`<tr><th scope="row">${load(point)}</th>${names.map((name) => {
            const error = point.error?.[name];
            return html`<td>${text(point.measured?.[name], unit(name))}${typeof error === "number" && html`<br /><b
              class=${`error ${size(error)}`}>
              ${signed(error, share)}</b>`}${typeof point.simulated?.[name] === "number" && html` <span class="was">
              ${text(point.simulated[name], unit(name))}</span>`}</td>`;
          })}</tr>`,
      )}</tbody></table></div>
    ${bench.notes?.map((note) => html`<p class="foot">${note}</p>`)}
    ${!frozen() && html`<p><button type="button" disabled=${fitted?.running} onClick=${() => fit(bench.name)}>
      ${fitted?.running && fitted.file === bench.name ? "Fitting" : "Fit to these points"}</button> The serving stack's own times are fitted; the curves then move.</p>`}
    ${fitted?.file === bench.name && fitted.refused && html`<p class="sentence">${fitted.refused}</p>`}
    ${fitted?.file === bench.name && fitted.after && html`<${Fitted} fitted=${fitted} />`}
  </article>`;
}

export const Yours = memo(
  ({ benches, fit: fitted }) => html`<section class="panel" aria-label="Yours over ours">
  <div class="panelhead"><h2>Yours over ours</h2>
    <p>Below each measured figure stand the error of the simulated one, and that figure itself. A point is simulated with its own load; the curves have the workload of the settings.</p></div>
  <${Drop} />
  ${benches.map((bench) => html`<${Bench} key=${bench.name} bench=${bench} fitted=${fitted} />`)}
</section>`,
);
