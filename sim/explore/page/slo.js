// The limits of the SLO that is set, by latency.
import { page, valueOfControl } from "explore/session.js";

/** `{ttft_s: [["each", 1], ["p95", 0.5]], …}`: limits in seconds by latency, those that are set. */
export function limits(set) {
  const found = {};
  for (const each of page.controls.groups.flatMap((group) => group.controls)) {
    const name = /^slo\.(ttft|tpot|e2e)l?(?:_(mean|p\d+))?_s$/.exec(each.key);
    const value = valueOfControl(each, set);
    if (name && typeof value === "number") (found[`${name[1]}_s`] ??= []).push([name[2] ?? "each", value]);
  }
  return found;
}

/** A rule for each limit of a latency; limits of one value have one. */
export function rules(limit, name, axis) {
  const labels = new Map();
  for (const [of, value] of limit[name] ?? []) labels.set(value, [...(labels.get(value) ?? []), of]);
  return [...labels].map(([value, of]) => ({
    type: "rule",
    [axis]: value,
    label: `SLO (${of.join(", ")})`,
    colour: "vermillion",
  }));
}
