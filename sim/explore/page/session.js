// What the page knows and does: its state, the answers to it, and the actions that change them. Values are replaced, never changed in
// place, so that a component sees by identity whether it is to be drawn again.
import { controlsOf, exported, frozen, requestsOf, sendBench, stop, stream } from "explore/api.js";
import { MAIN, nameOf, text } from "explore/figures.js";
import { changed, fromHash, toHash } from "explore/state.js";

/** The least time between two requests for a run while a slider moves. */
const BETWEEN_MS = 60;
const NO_BRUSH = { rate: null, front: null, time: null, ttft_s: null, tpot_s: null, e2e_s: null };
const THEORIES = ["speculation", "chunks", "bubbles", "placement"];

export const page = {
  scenario: "",
  controls: { groups: [] }, // those of the present state
  own: {}, // values of the scenario itself, by key
  set: {},
  view: "answer",
  first: "answer", // the view that is shown where the URL has none
  watch: null, // {where}: the fleet that is watched
  fleet: null, // its present state, the traffic so far and what the policy would do
  unread: null, // a sentence: why the last look saw nothing
  over: {},
  answer: null, // the last one, an estimate until the exact one is there
  waiting: false, // whether the answer to the present state is still to come, or only estimated
  refused: null, // {sentence, key}
  failed: null, // a sentence about something else that did not work
  explained: null, // {of, explained, whatIfs, done, refused}
  curve: null, // {of, points, before, knee, done, refused}
  candidates: null, // {of, rows, before, done, refused}
  theory: {}, // by view {of, lines, done, refused}
  requests: null, // {of, columns, total}
  request: null, // the row that is open
  brush: NO_BRUSH,
  benches: [],
  fit: null, // {file, running, before, after, refused}
  held: null, // {set, answer}: the state to compare with
  compared: null, // {of, how, differences, done, refused}: the present state from the held one
  said: "", // for screen readers
};

const listeners = new Set();
let drawing = 0;
export const onChange = (draw) => listeners.add(draw);

export function update(patch) {
  Object.assign(page, patch);
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    for (const draw of listeners) draw();
  });
}

export const control = (key) => page.controls.groups.flatMap((group) => group.controls).find((each) => each.key === key);
export const valueOfControl = (each, set = page.set) => (each.key in set ? set[each.key] : ownValue(each));
/** The value that the scenario has for a control; of one that only the present traffic or decoding has, what comes with that. */
export const ownValue = (each) => (each.key in page.own ? page.own[each.key] : each.value);
const identity = (set = page.set) => JSON.stringify(Object.entries(set).sort());

// ---- the URL

function write(how) {
  history[how](null, "", location.pathname + location.search + toHash({ ...page, held: page.held?.set ?? null }));
}
let written = 0;
function writeSoon() {
  clearTimeout(written);
  written = setTimeout(() => write("replaceState"), 200);
}

function restore() {
  const found = fromHash(location.hash, page.first);
  const same = identity(found.set) === identity();
  update({ view: found.view, over: found.over, set: found.set });
  if (found.held && JSON.stringify(found.held) !== JSON.stringify(page.held?.set)) hold(found.held);
  if (!found.held) update({ held: null });
  if (same) follow();
  else ask();
}

// ---- from the page's data to the first answer

export function start() {
  const data = window.ROOFTRACE ?? {};
  const found = frozen() ? { set: data.state?.set ?? {}, view: "answer", held: null, over: {} } : fromHash(location.hash, data.watch ? "now" : "answer");
  Object.assign(page, {
    watch: data.watch ?? null,
    first: data.watch ? "now" : "answer",
    scenario: data.name ?? "",
    controls: data.controls ?? { groups: [] },
    benches: data.benches ?? [],
    set: found.set,
    view: found.view,
    over: found.over,
    answer: data.answer ?? null,
    refused: data.refused ?? null,
  });
  page.own = Object.fromEntries(page.controls.groups.flatMap((group) => group.controls.map((each) => [each.key, each.value])));
  renewControls();
  if (data.explained && !Object.keys(found.set).length)
    page.explained = { of: identity(), explained: data.explained, whatIfs: [], done: false };
  if (found.held) hold(found.held);
  if (page.watch) watch();
  addEventListener("popstate", restore);
  addEventListener("hashchange", restore);
  const answered = page.answer && (frozen() || !Object.keys(found.set).length);
  if (answered && page.answer.kind === "exact") settled();
  else ask();
}

// ---- a fleet that runs

/** The time until the stream of looks is opened again where it ended. */
const AGAIN_MS = 5000;

async function watch() {
  await stream("watch", {}, (name, data) => {
    if (name !== "fleet") return update({ unread: data.sentence });
    const said = data.policy && data.policy.does !== page.fleet?.policy?.does ? data.policy.does : page.said;
    update({ fleet: data, unread: null, said });
  });
  setTimeout(watch, AGAIN_MS);
}

// ---- a run

let last = 0;
let asking = 0;

/** Change the setting of a control; `undefined` puts the scenario's own value back. */
export function change(each, value) {
  changeAll(changed(page.set, each, value, ownValue(each)));
  writeSoon();
}

/** Settings on which it depends which controls there are. */
const SECTIONS = ["workload", "decoding"];
const sections = (set) => JSON.stringify(SECTIONS.map((key) => set[key]));
let controlsFor = sections({});

async function renewControls() {
  const wanted = sections(page.set);
  if (wanted === controlsFor || frozen()) return;
  controlsFor = wanted;
  const found = await controlsOf(page.set);
  if (found && controlsFor === wanted) update({ controls: found });
}

function changeAll(set) {
  update({ set, waiting: true });
  renewControls();
  clearTimeout(asking);
  asking = setTimeout(ask, Math.max(0, last + BETWEEN_MS - performance.now()));
}

/** Open a state: that of a candidate, of a point of a curve, or of what was held. */
export function open(set) {
  changeAll(set);
  write("pushState");
}

function ask() {
  clearTimeout(asking);
  last = performance.now();
  const of = identity();
  for (const path of ["curve", "candidates", "explain", "theory", "compare"]) stop(path);
  update({ waiting: true });
  stream("run", { set: page.set }, (name, data) => {
    if (name === "estimate") update({ answer: data, refused: null, failed: null });
    if (name === "exact") {
      update({ answer: withSeries(data, page.answer), refused: null, failed: null });
      if (of === identity()) settled();
    }
    if (name === "refused") update({ refused: data, waiting: false, said: `Refused: ${data.sentence}` });
  }).then((whole) => {
    const sentence = "The server ended without an answer.";
    if (whole && page.waiting && of === identity()) update({ refused: { sentence }, waiting: false, said: sentence });
  });
}

/** Figures that are known come before the course of their run: until then that of the estimate stands in, drawn as one. */
const withSeries = (answer, before) =>
  answer.series || before?.kind !== "estimate"
    ? answer
    : { ...answer, series: before.series, distributions: before.distributions, rough: true };

/** The exact answer is there: say it, and ask for what the view shows beside it. */
function settled() {
  update({ waiting: false, request: null, said: spoken(page.answer) });
  if (page.requests?.of !== page.answer.key)
    update({ requests: null, brush: { ...page.brush, time: null, ttft_s: null, tpot_s: null, e2e_s: null } });
  follow();
}

const spoken = (answer) =>
  `Exact answer: ${MAIN.filter((name) => answer.figures[name])
    .slice(0, 5)
    .map((name) => `${nameOf(name)} ${text(answer.figures[name].value, answer.figures[name].unit)}`)
    .join(", ")}.`;

/** Ask for what the present view shows and what is not there yet. */
export function follow() {
  if (page.waiting) return;
  explain(page.view === "why");
  if (page.view === "answer" || page.view === "yours") askCurve();
  if (page.view === "answer") askCandidates();
  if (page.view === "requests") loadRequests();
  if (page.view === "yours") renewBenches();
  if (page.view === "compare" && page.held) compare();
}

export function show(view) {
  if (view === page.view) return;
  update({ view });
  write("pushState");
  if (view !== "speedup") stop("theory");
  follow();
}

// ---- what stands beside a run

/** Where the time goes; with *whole* what a tenth more of each resource changes, which takes runs of its own. */
function explain(whole) {
  const of = identity();
  if (page.explained?.of === of && (page.explained.done || !whole)) return;
  const kept = page.explained?.of === of ? page.explained : { of, explained: null, whatIfs: [], done: false };
  update({ explained: { ...kept, whatIfs: [] } });
  const put = (patch) => update({ explained: { ...page.explained, ...patch } });
  stream("explain", { set: page.set }, (name, data) => {
    if (name === "explained") {
      put({ explained: data });
      if (!whole) stop("explain");
    }
    if (name === "what_if") put({ whatIfs: [...page.explained.whatIfs, data] });
    if (name === "done") put({ done: true });
    if (name === "refused") put({ refused: data.sentence, done: true });
  }).then((whole) => {
    // Ended before it said anything: asked for again.
    if (!whole && page.explained?.of === of && !page.explained.explained) put({ of: null });
  });
}

function askCurve() {
  const of = identity();
  if (page.curve?.of === of) return;
  update({
    curve: { of, points: [], before: page.curve?.points.length ? page.curve.points : (page.curve?.before ?? []), done: false },
  });
  const put = (patch) => update({ curve: { ...page.curve, ...patch } });
  stream("curve", { set: page.set, points: 9 }, (name, data) => {
    if (name === "point") {
      const others = page.curve.points.filter((each) => each.rate_per_s !== data.rate_per_s);
      put({ points: [...others, data].sort((a, b) => a.rate_per_s - b.rate_per_s) });
    }
    if (name === "done") put({ done: true, knee: data.knee_per_s ?? null, before: [] });
    if (name === "refused") put({ done: true, refused: data.sentence });
  }).then((whole) => {
    // Ended by a newer state: asked for again when the page comes back to this one.
    if (!whole && page.curve?.of === of && !page.curve.done) update({ curve: { ...page.curve, of: null } });
  });
}

export function askCandidates() {
  const of = identity() + JSON.stringify(page.over);
  if (page.candidates?.of === of) return;
  update({
    candidates: {
      of,
      rows: [],
      before: page.candidates?.rows.length ? page.candidates.rows : (page.candidates?.before ?? []),
      done: false,
    },
  });
  const put = (patch) => update({ candidates: { ...page.candidates, ...patch } });
  stream("candidates", { set: page.set, over: page.over }, (name, data) => {
    if (name === "candidate") put({ rows: [...page.candidates.rows.filter((each) => each.name !== data.name), data] });
    if (name === "done") {
      const front = new Set(data.front ?? []);
      put({
        done: true,
        before: [],
        rows: page.candidates.rows.map((each) => ({ ...each, on_front: front.has(each.name) || (!data.front && each.on_front) })),
      });
    }
    if (name === "refused") put({ done: true, refused: data.sentence });
  }).then((whole) => {
    if (!whole && page.candidates?.of === of && !page.candidates.done) update({ candidates: { ...page.candidates, of: null } });
  });
}

export function vary(key, values) {
  const over = { ...page.over, [key]: values };
  if (!values.length) delete over[key];
  update({ over });
  writeSoon();
  if (!page.waiting) askCandidates();
}

export function askTheory(view) {
  const of = identity();
  if (page.theory[view]?.of === of || !THEORIES.includes(view)) return;
  const put = (patch) => update({ theory: { ...page.theory, [view]: { ...page.theory[view], ...patch } } });
  put({ of, lines: [], done: false, refused: null });
  stream("theory", { set: page.set, view }, (name, data) => {
    if (name === "lines") put({ lines: [...page.theory[view].lines.filter((each) => each.title !== data.title), data] });
    if (name === "refused") put({ refused: data.sentence });
  }).then((whole) => put(whole ? { done: true } : { of: null }));
}

export async function loadRequests() {
  const key = page.answer?.key;
  if (!key || page.answer.kind !== "exact" || page.requests?.of === key) return;
  update({ requests: { of: key, columns: null, total: 0 } });
  try {
    const found = await requestsOf(key);
    if (page.requests?.of === key)
      update({ requests: { of: key, columns: found?.columns ?? null, total: found?.of ?? 0, missing: !found } });
  } catch (error) {
    update({ requests: { of: null, columns: null, total: 0 }, failed: error.message });
  }
}

export function brush(name, range) {
  update({ brush: { ...page.brush, [name]: range } });
  if (!["rate", "front"].includes(name) && range) loadRequests();
}
export const clearBrushes = () => update({ brush: NO_BRUSH });
export const brushed = () => Object.values(page.brush).some(Boolean);

/** Rows of the requests that every brush holds; null where none is set or they are not there. */
export function chosenRows(columns, brushes) {
  const tests = Object.entries({
    arrival_s: brushes.time,
    ttft_s: brushes.ttft_s,
    tpot_s: brushes.tpot_s,
    e2e_s: brushes.e2e_s,
  }).filter(([name, range]) => range && columns?.[name]);
  if (!tests.length) return null;
  const rows = [];
  for (let row = 0; row < columns.arrival_s.length; row++) {
    if (
      tests.every(([name, [low, high]]) => columns[name][row] !== null && columns[name][row] >= low && columns[name][row] <= high)
    )
      rows.push(row);
  }
  return rows;
}

// ---- two states side by side

export function hold(set = page.set) {
  const own = identity(set) === identity() && !page.waiting ? page.answer : null;
  update({ held: { set, answer: own }, compared: null });
  writeSoon();
  follow();
  if (own) return;
  stream(
    "run",
    { set },
    (name, data) => {
      if (name !== "refused") update({ held: { ...page.held, answer: data } });
      else update({ held: null, failed: data.sentence });
    },
    "-held",
  );
}

/** The differences of the present state from the held one over the same requests, which take runs of both. */
function compare() {
  const of = identity(page.held.set) + identity();
  if (page.compared?.of === of || identity(page.held.set) === identity()) return;
  const put = (patch) => update({ compared: { ...page.compared, ...patch } });
  update({ compared: { of, differences: {}, done: false } });
  stream("compare", { set: page.set, from: { set: page.held.set } }, (name, data) => {
    if (name === "compared") put({ ...data, done: true });
    if (name === "refused") put({ refused: data.sentence, done: true });
  }).then((whole) => {
    if (!whole && page.compared?.of === of && !page.compared.done) put({ of: null });
  });
}

export function release() {
  stop("run", "-held");
  stop("compare");
  update({ held: null });
  writeSoon();
}

// ---- measurements

export async function addBench(file) {
  update({ failed: null });
  try {
    const of = identity();
    const bench = { ...(await sendBench(file, page.set)), of, file };
    update({
      benches: [...page.benches.filter((each) => each.name !== bench.name), bench],
      said: `${bench.name}: ${bench.points.length} measured points lie over the curves.`,
    });
    askCurve();
  } catch (error) {
    update({ failed: `${file.name}: ${error.message}` });
  }
}

/** Simulate the measured runs in the present state, where they were in another. */
async function renewBenches() {
  for (const bench of page.benches.filter((each) => each.file && each.of !== identity())) {
    const of = identity();
    const replaced = (by) => update({ benches: page.benches.map((each) => (each.name === bench.name ? by : each)) });
    try {
      const found = await sendBench(bench.file, page.set);
      if (of === identity()) replaced({ ...found, of, file: bench.file });
    } catch (error) {
      replaced({ ...bench, of, notes: [error.message] });
    }
  }
}

export function dropBench(name) {
  update({ benches: page.benches.filter((each) => each.name !== name), fit: page.fit?.file === name ? null : page.fit });
}

export function fit(file) {
  update({ fit: { file, running: true } });
  stream("fit", { set: page.set, file }, (name, data) => {
    if (name === "fitted") {
      update({ fit: { file, running: false, ...data }, said: `Fitted to ${file}.` });
      open({ ...page.set, ...data.set });
    }
    if (name === "refused") update({ fit: { file, running: false, refused: data.sentence } });
  }).then((whole) => {
    if (page.fit?.running)
      update({ fit: whole ? { file, running: false, refused: "The server ended without an answer." } : null });
  });
}

// ---- to take away

export async function download() {
  try {
    const blob = await exported({ set: page.set, over: page.over, view: page.view });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = "rooftrace.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (error) {
    update({ failed: error.message });
  }
}
