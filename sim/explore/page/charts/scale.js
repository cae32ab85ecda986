// From values to pixels: linear and logarithmic scales with their ticks.

const STEPS = [1, 2, 2.5, 5, 10];

/** At most about *count* round values from *low* to *high*. */
export function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * STEPS.find((each) => each * power >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}

export function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  const parts = decades * 2.5 <= count ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (power % every) continue;
    for (const part of parts) {
      const tick = Number((part * 10 ** power).toPrecision(6));
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks.length >= 2 ? ticks : linearTicks(low, high, count).filter((tick) => tick > 0);
}

/** The least and greatest finite value of lists; null where there is none. */
export function extent(lists, positive = false) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists)
    for (const value of list ?? []) {
      if (typeof value !== "number" || !Number.isFinite(value) || (positive && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  return low <= high ? [low, high] : null;
}

/** A scale of *domain* onto pixels *from* to *to*: `{at(value), value(pixel), ticks(count), domain}`. */
export function scale({ log = false, domain, from, to }) {
  let [low, high] = domain;
  if (log) {
    if (high < low * 1.2) [low, high] = [low / 1.5, high * 1.5];
    const span = Math.log(high / low);
    return {
      log,
      domain: [low, high],
      at: (value) => from + ((to - from) * Math.log(Math.max(value, low * 1e-3) / low)) / span,
      value: (pixel) => low * Math.exp((span * (pixel - from)) / (to - from)),
      ticks: (count) => logTicks(low, high, count),
    };
  }
  if (high - low <= Math.abs(high) * 1e-9) [low, high] = low > 0 ? [0, high * 1.2] : [low, high + 1];
  return {
    log,
    domain: [low, high],
    at: (value) => from + ((to - from) * (value - low)) / (high - low),
    value: (pixel) => low + ((high - low) * (pixel - from)) / (to - from),
    ticks: (count) => linearTicks(low, high, count),
  };
}
