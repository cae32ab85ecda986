// The limits of the SLO that is set, by latency.
import { page, valueOfControl } from "explore/session.js";

/** `{ttft_s, tpot_s, e2e_s}`: seconds, those that are set. */
export function limits(set) {
  const found = {};
  for (const group of page.controls.groups.filter((each) => /slo/i.test(each.name)))
    for (const each of group.controls) {
      const name = /(ttft|tpot|e2e)l?_(s|ms)$/.exec(each.key);
      const value = valueOfControl(each, set);
      if (name && typeof value === "number") found[`${name[1]}_s`] = name[2] === "ms" ? value / 1e3 : value;
    }
  return found;
}

export const rule = (limit, axis) => (limit === undefined ? [] : [{ type: "rule", [axis]: limit, label: "SLO", colour: "vermillion", reach: true }]);
