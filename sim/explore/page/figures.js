// Names, units and texts of the figures of a run.

export const FIGURES = {
  requests_per_s: "Requests served",
  output_tokens_per_s: "Output tokens",
  output_tokens_per_s_per_device: "Output per device",
  output_tokens_per_s_per_user: "Output per user",
  slo_share: "Within SLO",
  goodput_per_s: "Goodput",
  devices: "Devices",
  cost_per_hour: "Cost",
  cost_per_mtoken: "Cost of output",
  kv_used_share: "KV in use",
  kv_used_max_share: "KV in use, greatest",
  prefix_hit_share: "Prefix hits",
  preemptions: "Preemptions",
  joule_per_token: "Energy of output",
};
/** Those that stand at the top, in this order, where the run has them. */
export const MAIN = [
  "ttft_mean_s",
  "ttft_p95_s",
  "tpot_mean_s",
  "e2e_p95_s",
  "slo_share",
  "goodput_per_s",
  "output_tokens_per_s_per_device",
  "output_tokens_per_s_per_user",
  "kv_used_share",
  "prefix_hit_share",
  "devices",
  "cost_per_hour",
  "cost_per_mtoken",
];
export const MEANING = {
  TTFT: "time to first token: from the arrival of a request to its first output token",
  TPOT: "time per output token after the first",
  E2EL: "end-to-end latency: from the arrival of a request to its last token",
  SLO: "service level objective: the latencies that the deployment should hold",
  Goodput: "requests a second that hold the SLO",
};
/** Figures of which less is better; of those in neither list nothing is better. */
const LESS = /^(ttft|tpot|e2e|cost|preemptions|joule)/;
const MORE = /^(requests_per_s|output_|slo_share|goodput)/;

const UNITS = {
  "J per output token": "J/tok",
  "requests/s": "req/s",
  "tokens/s": "tok/s",
  "tokens/s per device": "tok/s",
  "tokens/s per user": "tok/s",
  devices: "",
};
const MONEY = { $: "", "$/h": "/h", "$ per M output tokens": "/M tok" };

export function nameOf(name) {
  const latency = /^(ttft|tpot|e2e)_(mean|p\d+)_s$/.exec(name);
  return (
    FIGURES[name] ??
    (latency ? `${{ ttft: "TTFT", tpot: "TPOT", e2e: "E2EL" }[latency[1]]}, ${latency[2]}` : name.replaceAll("_", " "))
  );
}

/** Three significant digits without an exponent: 12,300 · 4.56 · 0.00789. */
export function number(value) {
  if (!Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e12)) return value.toExponential(2);
  const rounded = Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3));
  return rounded.toLocaleString("en-US", { maximumFractionDigits: 8 });
}

/** A duration: 8.31 ms · 1.2 s · 12 min, in the unit of *like* where that is given, so that an interval has one. */
export function duration(seconds, like = seconds) {
  const size = Math.abs(like);
  if (seconds === 0 && like === 0) return "0 s";
  if (size < 0.9995e-3) return `${number(seconds * 1e6)} µs`;
  if (size < 0.9995) return `${number(seconds * 1e3)} ms`;
  return size < 600 ? `${number(seconds)} s` : `${number(seconds / 60)} min`;
}

/** Per cent with one decimal, and below one per cent with two digits. */
export const share = (value) =>
  Number.isFinite(value) ? `${Number(Math.abs(value) < 0.01 ? (100 * value).toPrecision(2) : (100 * value).toFixed(1))} %` : "–";

/** *value* with its unit, for people. */
export function text(value, unit, like = value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (unit === "s") return duration(value, like);
  if (unit === "share") return share(value);
  if (unit in MONEY) return `$${Math.abs(value) < 1000 ? value.toFixed(2) : number(value)}${MONEY[unit]}`;
  return `${number(value)} ${UNITS[unit] ?? unit ?? ""}`.trimEnd();
}

/** "80 to 92 ms" of a figure that has an interval; null where it has none. */
export function interval({ value, low, high, unit }) {
  if (low === undefined || low === null || high === undefined || high === null) return null;
  const [first, last] = [text(low, unit, value), text(high, unit, value)];
  const ending = / [^\d]+$/.exec(last)?.[0];
  return `${ending && first.endsWith(ending) ? first.slice(0, -ending.length) : first} to ${last}`;
}

/** The difference of two figures, later less earlier: `{value, share}`; the share is null where the earlier one is 0. */
export function difference(earlier, later) {
  const value = later.value - earlier.value;
  return { value, share: earlier.value ? value / earlier.value : null };
}

const SAME = 1e-3;

/** "better", "worse" or "" of a change of a figure, which has to be a thousandth of it to be either. */
export function judged(name, { value: change, share }) {
  if (!change || (share !== null && Math.abs(share) < SAME)) return "";
  if (LESS.test(name)) return change < 0 ? "better" : "worse";
  if (MORE.test(name)) return change > 0 ? "better" : "worse";
  return "";
}

export const signed = (value, write) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${write(Math.abs(value))}`;
