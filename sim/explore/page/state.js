// The state of the page as the part of its URL behind `#`: settings over the scenario, the view, what is held to compare, what is varied.
//
//   #set=deployment.tensor_parallel%3D2&view=why&held=…&over=…
//
// A value is JSON, or a bare word.

const TEXT = /^[A-Za-z_./][\w./:+@ -]*$/;
const WORDS = ["true", "false", "null"];

export const valueText = (value) =>
  typeof value === "string" && TEXT.test(value) && !WORDS.includes(value) ? value : JSON.stringify(value);

export function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

const pairs = (settings) => Object.entries(settings).map(([key, value]) => `${key}=${valueText(value)}`);

function settingsOf(texts) {
  return Object.fromEntries(
    texts
      .filter((text) => text.indexOf("=") > 0)
      .map((text) => {
        const at = text.indexOf("=");
        return [text.slice(0, at), valueOf(text.slice(at + 1))];
      }),
  );
}

/** The URL's part of a state: `{set, view, held, over}`; `held` is null or settings, `over` lists of values by key. *first*: the view
 * that is shown where the URL has none. */
export function toHash({ set, view, held, over, first = "answer" }) {
  const query = new URLSearchParams();
  for (const pair of pairs(set)) query.append("set", pair);
  if (view && view !== first) query.append("view", view);
  if (held) {
    query.append("held", "");
    for (const pair of pairs(held)) query.append("held", pair);
  }
  for (const pair of pairs(over ?? {})) query.append("over", pair);
  const text = query.toString();
  return text ? `#${text}` : "";
}

export function fromHash(hash, first = "answer") {
  const query = new URLSearchParams(hash.replace(/^#/, ""));
  return {
    set: settingsOf(query.getAll("set")),
    view: query.get("view") || first,
    held: query.has("held") ? settingsOf(query.getAll("held")) : null,
    over: settingsOf(query.getAll("over")),
  };
}

/**
 * `set` with the setting of a control; none where the value is the scenario's *own*. Settings of a section go where the section is set
 * anew, and a setting brings those that it needs beside it (`also`) where they are not there yet.
 */
export function changed(set, { key, also }, value, own) {
  const next = Object.fromEntries(Object.entries(set).filter(([other]) => other !== key && !other.startsWith(`${key}.`)));
  if (value === undefined || JSON.stringify(value) === JSON.stringify(own)) return next;
  return { ...next, ...Object.fromEntries(Object.entries(also ?? {}).filter(([other]) => !(other in set))), [key]: value };
}
