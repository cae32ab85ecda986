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

export const rules = (limit, name, axis) =>
  (limit[name] ?? []).map(([of, value]) => ({ type: "rule", [axis]: value, label: of === "each" ? "SLO" : `SLO ${of}`, colour: "vermillion" }));
