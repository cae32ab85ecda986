// A chart in SVG: axes with units, marks, a readout that follows the pointer or the arrow keys, a brush, and its numbers as a table.
//
// A mark is {type, name, colour, x, y, …}:
//   line    light (an estimate), thin
//   points  shape, size, hollow, light, low and high (errors), labels, notes, picks (what a click does)
//   band    low and high over x
//   rule    x or y alone: a line across, with its label
// `legend` stands in for name and colour in the legend; a silent mark is in neither legend nor readout.
import { extent, scale } from "explore/charts/scale.js";
import { number } from "explore/figures.js";
import { html, useMemo, useRef, useState, useWidth } from "explore/ui.js";

const SPACE = { top: 10, right: 14, bottom: 38, left: 54 };
const CLICK_PX = 4;
const REACH_PX = 28;

/** How an axis writes its values: seconds as ms or s, shares as per cent, by the greatest value on it. */
export function written(unit, domain) {
  if (unit === "s" && domain[1] < 2) return { unit: "ms", factor: 1e3 };
  if (unit === "share") return { unit: "%", factor: 100 };
  return { unit, factor: 1 };
}

const path = (xs, ys) => {
  let text = "";
  let pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (!Number.isFinite(xs[i]) || !Number.isFinite(ys[i])) {
      pen = "M";
      continue;
    }
    text += `${pen}${xs[i].toFixed(1)},${ys[i].toFixed(1)}`;
    pen = "L";
  }
  return text;
};

const SHAPES = {
  circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  square: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  diamond: (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0z`,
  triangle: (r) => `M0,${-1.2 * r}L${1.2 * r},${r}L${-1.2 * r},${r}z`,
  cross: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
};

const colour = (name) => `var(--${name ?? "blue"})`;
const titled = (axis, how) => `${axis.label}${how.unit ? ` (${how.unit})` : ""}`;

function Mark({ mark, x, y, inside }) {
  const at = (list, axis) =>
    list.map((value) => (value === null || value === undefined || (axis.log && value <= 0) ? NaN : axis.at(value)));
  if (mark.type === "rule") {
    const across = mark.y !== undefined;
    const place = across ? y.at(mark.y) : x.at(mark.x);
    if (!(place >= (across ? inside.top : inside.left) - 1 && place <= (across ? inside.bottom : inside.right) + 1)) return null;
    const line = across
      ? { x1: inside.left, x2: inside.right, y1: place, y2: place }
      : { x1: place, x2: place, y1: inside.top, y2: inside.bottom };
    const late = !across && place > (inside.left + inside.right) / 2;
    return html`<g class="rule" style="--c:${colour(mark.colour ?? "vermillion")}">
      <line ...${line} />
      <text x=${across ? inside.left + 6 : place + (late ? -5 : 5)}
        y=${across ? place - 4 : inside.top + 10 + 13 * (mark.row ?? 0)} text-anchor=${late ? "end" : "start"}>${mark.label}</text>
    </g>`;
  }
  const xs = at(mark.x, x);
  if (mark.type === "band") {
    const [low, high] = [at(mark.low, y), at(mark.high, y)];
    return html`<path class="band" style="--c:${colour(mark.colour)}"
      d=${`${path(xs, high)}${path([...xs].reverse(), [...low].reverse()).replace(/^M/, "L")}z`} />`;
  }
  const ys = at(mark.y, y);
  if (mark.type === "line") {
    return html`<path class=${`line ${mark.light ? "light" : ""} ${mark.thin ? "thin" : ""}`} style="--c:${colour(mark.colour)}"
      d=${path(xs, ys)} />`;
  }
  const shape = SHAPES[mark.shape ?? "circle"](mark.size ?? 4);
  return html`<g
    class=${`points ${mark.light ? "light" : ""} ${mark.hollow ? "hollow" : ""} ${mark.shape === "cross" ? "cross" : ""}`}
    style="--c:${colour(mark.colour)}">
    ${mark.low && xs.map((px, i) => Number.isFinite(px) && Number.isFinite(mark.low[i]) && html`<line
      class="error" x1=${px} x2=${px} y1=${y.at(mark.low[i])} y2=${y.at(mark.high[i])} />`)}
    ${xs.map((px, i) => Number.isFinite(px) && Number.isFinite(ys[i]) && html`<path
      transform=${`translate(${px.toFixed(1)},${ys[i].toFixed(1)})`} d=${shape} />`)}
  </g>`;
}

/** Labels beside their points, those of later marks first, without any that would lie over another or over a point. */
function labels(all, inside) {
  const placed = [];
  for (const each of [...all].reverse()) {
    const text = each.mark.labels?.[each.i];
    if (!text || each.mark.unlabelled) continue;
    const width = 6.3 * text.length;
    for (const [dx, dy] of [
      [8, -6],
      [-8, -6],
      [8, 14],
      [-8, 14],
    ]) {
      const left = dx > 0 ? each.px + dx : each.px + dx - width;
      const box = { left, right: left + width, top: each.py + dy - 10, bottom: each.py + dy + 3 };
      const free =
        box.left >= inside.left &&
        box.right <= inside.right + 8 &&
        box.top >= inside.top - 6 &&
        box.bottom <= inside.bottom &&
        placed.every(
          (other) => box.right < other.left || box.left > other.right || box.bottom < other.top || box.top > other.bottom,
        ) &&
        all.every(
          (other) =>
            other === each ||
            other.px < box.left - 3 ||
            other.px > box.right + 3 ||
            other.py < box.top - 3 ||
            other.py > box.bottom + 3,
        );
      if (free) {
        placed.push({ ...box, x: each.px + dx, y: each.py + dy, anchor: dx > 0 ? "start" : "end", text });
        break;
      }
    }
  }
  return placed;
}

function Axes({ x, y, inside, xAxis, xWritten, yWritten }) {
  const xTicks = x.ticks(Math.max(2, Math.floor((inside.right - inside.left) / 62)));
  const yTicks = y.ticks(Math.max(2, Math.floor((inside.bottom - inside.top) / (y.log ? 26 : 38))));
  return html`<g class="axes">
    ${yTicks.map(
      (tick) => html`<g key=${`y${tick}`}>
      <line class="gridline" x1=${inside.left} x2=${inside.right} y1=${y.at(tick)} y2=${y.at(tick)} />
      <text x=${inside.left - 7} y=${y.at(tick) + 4} text-anchor="end">${number(tick * yWritten.factor)}</text>
    </g>`,
    )}
    ${xTicks.map(
      (tick) => html`<g key=${`x${tick}`}>
      <line class="gridline" x1=${x.at(tick)} x2=${x.at(tick)} y1=${inside.top} y2=${inside.bottom} />
      <text x=${x.at(tick)} y=${inside.bottom + 15} text-anchor="middle">${number(tick * xWritten.factor)}</text>
    </g>`,
    )}
    <line class="base" x1=${inside.left} x2=${inside.right} y1=${inside.bottom} y2=${inside.bottom} />
    ${!xAxis.bare && html`<text class="title" x=${inside.right} y=${inside.bottom + 31} text-anchor="end">
      ${titled(xAxis, xWritten)}</text>`}
  </g>`;
}

/** Points that the readout may stop at, with their place on the sheet. */
function stops(marks, x, y) {
  return marks
    .filter((mark) => ["line", "points"].includes(mark.type) && !mark.silent)
    .flatMap((mark) =>
      mark.x
        .map((value, i) => ({ mark, i, px: x.at(value), py: y.at(mark.y[i]) }))
        .filter((each) => Number.isFinite(each.px) && Number.isFinite(each.py)),
    );
}

function nearest(all, px, py, across) {
  let [best, least] = [null, across ? Infinity : REACH_PX];
  for (const each of all) {
    const far = across ? Math.abs(each.px - px) : Math.hypot(each.px - px, each.py - py);
    if (far < least) [best, least] = [each, far];
  }
  return best;
}

function Readout({ at, all, across, place, say, width }) {
  const rows = across
    ? [...new Map(all.filter((each) => Math.abs(each.px - at.px) < 0.51).map((each) => [each.mark.name, each])).values()]
    : [at];
  const right = at.px > width / 2;
  return html`<div class="readout" role=${at.byKey ? "status" : undefined}
    style=${right ? `right:${width - at.px + 12}px` : `left:${at.px + 12}px`}>
    <b>${place(at)}</b>
    ${rows.map((each) => html`<div><i style="background:${colour(each.mark.colour)}" />${each.mark.name} <span>${say(each)}</span></div>`)}
    ${at.mark.picks && html`<em>Enter or click opens it</em>`}
  </div>`;
}

function Numbers({ marks, xAxis, yAxis }) {
  const [shown, setShown] = useState(false);
  const rows =
    shown &&
    marks.filter((mark) => mark.x && mark.y && !mark.silent).flatMap((mark) => mark.x.map((value, i) => ({ mark, value, i })));
  return html`<details class="numbers" onToggle=${(event) => setShown(event.currentTarget.open)}>
    <summary>Numbers</summary>
    ${
      shown &&
      html`<div class="scroll" tabindex="0" role="region" aria-label="Numbers of the chart"><table><thead><tr><th
        scope="col">Series</th><th scope="col">${titled(xAxis, xAxis)}</th><th scope="col">${titled(yAxis, yAxis)}</th></tr></thead>
      <tbody>${rows.slice(0, 600).map(({ mark, value, i }) => html`<tr><td>${mark.labels?.[i] || mark.name}</td><td>
        ${number(value)}</td><td>${number(mark.y[i])}</td></tr>`)}</tbody></table>
      ${rows.length > 600 && html`<p>The first 600 of ${number(rows.length)} rows.</p>`}</div>`
    }
  </details>`;
}

function Legend({ marks }) {
  const shown = marks
    .filter((mark) => mark.name && !mark.silent && mark.type !== "rule")
    .map((mark) => ({ ...mark, ...mark.legend }));
  const named = [...new Map(shown.map((mark) => [mark.name, mark])).values()];
  if (named.length < 2) return null;
  return html`<ul class="legend">${named.map(
    (mark) => html`<li>
    <svg width="22" height="10" aria-hidden="true" style="--c:${colour(mark.colour)}">${
      mark.type === "points"
        ? html`<g class=${`points ${mark.hollow ? "hollow" : ""} ${mark.shape === "cross" ? "cross" : ""}`}><path
          transform="translate(11,5)" d=${SHAPES[mark.shape ?? "circle"](3.6)} /></g>`
        : mark.type === "band"
          ? html`<rect class="band" width="22" height="10" />`
          : html`<path class=${`line ${mark.light ? "light" : ""} ${mark.thin ? "thin" : ""}`} d="M1,5H21" />`
    }</svg>${mark.name}</li>`,
  )}</ul>`;
}

/** Scales, marks that have something to draw, and the points that the readout may stop at; null where there is nothing. */
function laid(marks, xAxis, yAxis, width, height) {
  const space = { ...SPACE, ...(xAxis.bare ? { bottom: 20 } : {}) };
  const inside = { left: space.left, right: width - space.right, top: space.top, bottom: height - space.bottom };
  const drawn = marks.filter((mark) => mark.type === "rule" || mark.x?.length);
  const data = drawn.filter((mark) => mark.type !== "rule");
  const xFound =
    xAxis.domain ??
    reached(
      extent(
        data.map((mark) => mark.x),
        xAxis.log,
      ),
      drawn,
      "x",
      xAxis.log,
    );
  const yFound =
    yAxis.domain ??
    reached(
      extent(
        data.flatMap((mark) => [mark.y, mark.low, mark.high]),
        yAxis.log,
      ),
      drawn,
      "y",
      yAxis.log,
    );
  if (!xFound || !yFound || !drawn.some((mark) => mark.type !== "rule")) return { drawn };
  const x = scale({ log: xAxis.log, domain: padded(xFound, xAxis), from: inside.left, to: inside.right });
  const y = scale({ log: yAxis.log, domain: padded(yFound, yAxis), from: inside.bottom, to: inside.top });
  const all = stops(drawn, x, y).sort((a, b) => a.px - b.px || a.py - b.py);
  return {
    drawn: inRows(drawn, x),
    inside,
    x,
    y,
    all,
    labelled: labels(all, inside),
    xWritten: written(xAxis.unit, x.domain),
    yWritten: written(yAxis.unit, y.domain),
  };
}

const REACHED = 8;

const LABEL_PX = 70;

/** Upright rules with the row of their label: the next one where the label of an earlier rule is near. */
function inRows(drawn, x) {
  const upright = drawn.filter((mark) => mark.type === "rule" && mark.x !== undefined);
  const near = (mark) =>
    upright.slice(0, upright.indexOf(mark)).filter((other) => Math.abs(x.at(other.x) - x.at(mark.x)) < LABEL_PX).length;
  return drawn.map((mark) => (upright.includes(mark) ? { ...mark, row: near(mark) } : mark));
}

/** *found* widened to the rules that are near: of an axis in decades those within a factor of `REACHED`, else those above by half. */
function reached(found, drawn, name, log) {
  if (!found) return null;
  const near = drawn
    .filter((mark) => mark.type === "rule" && mark[name] !== undefined)
    .map((mark) => mark[name])
    .filter((value) => (log ? value > found[0] / REACHED && value < found[1] * REACHED : value > 0 && value < 1.5 * found[1]));
  return [Math.min(found[0], ...near), Math.max(found[1], ...near)];
}

function padded([low, high], axis) {
  if (axis.domain) return [low, high];
  if (axis.afloat) return [Math.max(0, low - 0.12 * (high - low)), high + 0.12 * (high - low)];
  if (axis.log) return [low / 1.12, high * 1.12];
  const from = Math.min(0, low);
  return [from, high + 0.06 * (high - from)];
}

const write = (value, how) => `${number(value * how.factor)}${how.unit ? ` ${how.unit}` : ""}`;
const ordered = (a, b) => (a <= b ? [a, b] : [b, a]);
const clipped = (value, [low, high]) => Math.min(high, Math.max(low, value));

/** The rectangle of a brush on the sheet. */
function Brushed({ range, x, y, inside }) {
  const across = (scaled, values, limits) => values.map((value) => clipped(scaled.at(value), limits));
  const [left, right] = across(x, range.x ?? range, [inside.left, inside.right]);
  const [bottom, top] = range.y ? across(y, range.y, [inside.top, inside.bottom]) : [inside.bottom, inside.top];
  return html`<rect class="brush" x=${left} y=${top} width=${Math.max(1, right - left)} height=${Math.max(1, bottom - top)} />`;
}

/**
 * A chart. *across*: the readout gives every line's value at one x, else the nearest point's. *brush*: `{axes: "x" or "xy", range, set}`;
 * its range is `[low, high]`, or `{x, y}` of two axes. A range is set when the pointer is let go, so that nothing runs while it moves.
 */
export function Plot({
  title,
  note,
  marks,
  x: xAxis,
  y: yAxis,
  height = 250,
  brush,
  across = false,
  empty = "No values yet.",
  numbers = true,
  stale = false,
}) {
  const [ref, width] = useWidth(560);
  const [at, setAt] = useState(null);
  const [drag, setDrag] = useState(null);
  const anchor = useRef(null);
  const lay = useMemo(() => laid(marks, xAxis, yAxis, width, height), [marks, xAxis, yAxis, width, height]);
  const { drawn, inside, x, y, xWritten, yWritten, all } = lay;
  // Moving the pointer draws the readout again, not the marks.
  const layer = useMemo(
    () =>
      x &&
      html`${drawn.map((mark) => html`<${Mark} mark=${mark} x=${x} y=${y} inside=${inside} />`)}
    ${lay.labelled.map((each) => html`<text class="name" x=${each.x} y=${each.y} text-anchor=${each.anchor}>${each.text}</text>`)}`,
    [lay],
  );
  const head = html`<div class="charthead"><h3>${title}</h3>${note && html`<p>${note}</p>`}</div>`;
  if (!x) return html`<figure class="chart" ref=${ref}>${head}<p class="empty" style="height:${height}px">${empty}</p></figure>`;

  const both = brush?.axes === "xy";
  const rangeOf = (one, other) => {
    const range = { x: ordered(x.value(one[0]), x.value(other[0])), y: ordered(y.value(one[1]), y.value(other[1])) };
    return both ? range : range.x;
  };
  const openAt = (stop) => stop?.mark.picks?.[stop.i]?.();
  const pixels = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const down = (event) => {
    if (event.button !== 0) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    const from = pixels(event);
    setDrag({ from, to: from });
  };
  const move = (event) => {
    const [px, py] = pixels(event);
    if (drag) setDrag({ ...drag, to: [px, py] });
    setAt(nearest(all, px, py, across));
  };
  const up = (event) => {
    const [px, py] = pixels(event);
    const moved = drag && Math.hypot(px - drag.from[0], both ? py - drag.from[1] : 0) > CLICK_PX;
    setDrag(null);
    if (moved && brush) return brush.set(rangeOf(drag.from, [px, py]));
    const stop = nearest(all, px, py, false);
    if (stop?.mark.picks) openAt(stop);
    else if (brush?.range) brush.set(null);
  };
  const key = (event) => {
    if (event.key === "Escape") {
      setAt(null);
      anchor.current = null;
      if (brush?.range) brush.set(null);
    }
    if (event.key === "Enter") openAt(at);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const here = at ? all.findIndex((each) => each.mark === at.mark && each.i === at.i) : -1;
    let next = here < 0 ? (step > 0 ? 0 : all.length - 1) : here + step;
    while (across && at && all[next] && Math.abs(all[next].px - at.px) < 0.51) next += step;
    const stop = all[clipped(next, [0, all.length - 1])];
    setAt({ ...stop, byKey: true });
    if (!event.shiftKey || !brush) anchor.current = null;
    else {
      anchor.current ??= at ?? stop;
      brush.set(rangeOf([anchor.current.px, inside.top], [stop.px, inside.bottom]));
    }
  };
  const place = (each) =>
    (!across && each.mark.labels?.[each.i]) ||
    `${xAxis.label} ${write(across ? x.value(each.px) : each.mark.x[each.i], xWritten)}`;
  const said = (each) =>
    [
      !across && each.mark.labels && write(each.mark.x[each.i], xWritten),
      write(each.mark.y[each.i], yWritten),
      each.mark.notes?.[each.i],
    ]
      .filter(Boolean)
      .join(" · ");
  const range = drag ? brush && rangeOf(drag.from, drag.to) : brush?.range;
  const keys = `Arrow keys step through its values${drawn.some((mark) => mark.picks) ? ", Enter opens one" : ""}${brush ? ", with Shift they choose a range, Escape lets it go" : ""}.`;
  return html`<figure class=${`chart ${stale ? "stale" : ""}`} ref=${ref}>
    ${head}
    <${Legend} marks=${drawn} />
    <p class="ytitle">${titled(yAxis, yWritten)}</p>
    <div class=${`sheet ${brush ? "brushable" : ""}`} tabindex="0" role="group" aria-roledescription="chart"
      aria-label=${`${title}. ${keys}`}
      onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} onPointerCancel=${() => setDrag(null)}
        onPointerLeave=${() => !drag && setAt(null)}
      onKeyDown=${key} onBlur=${() => setAt(null)}>
      <svg width=${width} height=${height} aria-hidden="true">
        <${Axes} x=${x} y=${y} inside=${inside} xAxis=${xAxis} xWritten=${xWritten} yWritten=${yWritten} />
        ${range && html`<${Brushed} range=${range} x=${x} y=${y} inside=${inside} />`}
        ${layer}
        ${at && (across ? html`<line
          class="cursor" x1=${at.px} x2=${at.px} y1=${inside.top} y2=${inside.bottom} />` : html`<circle class="cursor"
          cx=${at.px} cy=${at.py} r="8" />`)}
      </svg>
      ${at && html`<${Readout} at=${at} all=${all} across=${across} place=${place} say=${said} width=${width} />`}
    </div>
    ${numbers && html`<${Numbers} marks=${drawn} xAxis=${xAxis} yAxis=${yAxis} />`}
  </figure>`;
}
