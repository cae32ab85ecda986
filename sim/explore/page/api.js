// What the page asks of the server: streams of events that a newer request of the same kind ends, and in a frozen page what was recorded.

const client = Math.random().toString(36).slice(2, 12);
const token = () => new URLSearchParams(location.search).get("token");
const running = new Map();

export const frozen = () => Boolean(window.ROOFTRACE?.frozen);

function headers(more) {
  return token() ? { ...more, "X-Token": token() } : more;
}

/** Cut a stream of bytes into its server-sent events, `[name, data]` each. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r\n", "\n");
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const of = (field) =>
        lines.filter((line) => line.startsWith(`${field}:`)).map((line) => line.slice(field.length + 1).trimStart());
      const data = of("data");
      if (data.length) yield [of("event")[0] ?? "message", JSON.parse(data.join("\n"))];
    }
  }
}

/** The events that a frozen page has of a path, and of theory those of its view. */
function recorded(path, body) {
  const kept = window.ROOFTRACE.events?.[`/api/${path}`];
  return (
    (path === "theory" ? kept?.[body.view] : kept) ?? [
      [
        "refused",
        { sentence: "This file was written without these figures; the page that `rooftrace explore` serves has them." },
      ],
    ]
  );
}

/**
 * POST *body* to `/api/PATH` and give each event to *hear(name, data)*. A newer call with the same path and *who* ends it; then, or
 * when it is stopped, nothing more is heard. True where it ran to its end.
 */
export async function stream(path, body, hear, who = "") {
  stop(path, who);
  if (frozen()) {
    for (const [name, data] of recorded(path, body)) hear(name, data);
    return true;
  }
  const control = new AbortController();
  running.set(path + who, control);
  try {
    const response = await fetch(`/api/${path}`, {
      method: "POST",
      headers: headers({ "Content-Type": "application/json", "X-Client": client + who }),
      body: JSON.stringify(body),
      signal: control.signal,
    });
    if (!response.ok || !response.body) throw new Error(await said(response));
    for await (const [name, data] of events(response.body)) {
      if (control.signal.aborted) return false;
      hear(name, data);
    }
    return true;
  } catch (error) {
    if (control.signal.aborted) return false;
    hear("refused", {
      sentence: error instanceof TypeError ? "The server does not answer; start `rooftrace explore` again." : error.message,
    });
    return false;
  } finally {
    if (running.get(path + who) === control) running.delete(path + who);
  }
}

/** End what runs of *path*, and tell the server by closing the connection. */
export function stop(path, who = "") {
  running.get(path + who)?.abort();
  running.delete(path + who);
}

/** What an answer that is not 200 says, in its `sentence` or `error`, or as it is. */
async function said(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.sentence ?? body.error ?? text;
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

/** The controls of a state: which there are depends on its traffic and its decoding. */
export async function controlsOf(set) {
  const response = await fetch("/api/controls", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json", "X-Client": client }),
    body: JSON.stringify({ set }),
  });
  return response.ok ? response.json() : null;
}

export async function requestsOf(key) {
  if (frozen()) return window.ROOFTRACE.requests ?? null;
  const response = await fetch(`/api/requests?key=${encodeURIComponent(key)}`, { headers: headers({}) });
  if (!response.ok) throw new Error(await said(response));
  return response.json();
}

/** The measured runs in a file beside their simulation in the state *set*. */
export async function sendBench(file, set) {
  const response = await fetch("/api/bench", {
    method: "POST",
    headers: headers({
      "X-Client": client,
      "X-File": encodeURIComponent(file.name),
      "X-State": encodeURIComponent(JSON.stringify({ set })),
    }),
    body: file,
  });
  if (!response.ok) throw new Error(await said(response));
  return response.json();
}

export async function exported(body) {
  const response = await fetch("/api/export", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json", "X-Client": client }),
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await said(response));
  return response.blob();
}

export const timelineUrl = (key) =>
  `/api/timeline?key=${encodeURIComponent(key)}${token() ? `&token=${encodeURIComponent(token())}` : ""}`;
