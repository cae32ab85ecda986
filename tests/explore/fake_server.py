"""A small server in the form of `rooftrace explore`'s, with made-up answers at once, for tests of the page alone.

Its figures follow from the state by simple formulas. `held_back` names paths whose later events wait until they are let go, and
`asked` and `ended` record what the page asked for and which requests it cut off.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from sim.explore.standalone import inlined
from tests.sources import PACKAGES

PAGE = PACKAGES / "sim" / "explore" / "page"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html; charset=utf-8"}

Event = tuple[str, dict[str, Any]]


def controls() -> dict[str, Any]:
    def number(
        key: str, label: str, value: float | None, low: float, high: float, unit: str, **more: Any
    ) -> dict[str, Any]:
        each = {
            "key": key,
            "label": label,
            "kind": "number",
            "minimum": low,
            "maximum": high,
            "unit": unit,
            "value": value,
        }
        return {**each, "help": f"The {label.lower()} of the run.", **more}

    def choice(key: str, label: str, value: Any, *choices: Any) -> dict[str, Any]:
        return {
            "key": key,
            "label": label,
            "kind": "choice",
            "choices": list(choices),
            "value": value,
            "help": f"The {label.lower()}.",
        }

    layout = number("deployment.tensor_parallel", "Tensor parallel", 1, 1, 8, "devices", kind="integer")
    flag = {
        "key": "kv.prefix_cache",
        "label": "Prefix cache",
        "kind": "boolean",
        "value": True,
        "help": "Reuse of KV blocks.",
    }
    free = {
        "key": "workload.prompt_tokens",
        "label": "Prompt lengths",
        "kind": "text",
        "value": "lognormal(512, 1.2)",
        "help": "A distribution.",
    }
    groups = {
        "Model": [choice("model", "Model", "llama-3.1-8b", "llama-3.1-8b", "qwen3-32b", "deepseek-v3")],
        "Device": [choice("hardware", "Device", "h100-sxm", "h100-sxm", "h200-sxm", "a100-80g")],
        "Layout": [layout],
        "Workload": [number("workload.rate_per_s", "Rate", 6.0, 0.5, 50, "requests/s", scale="log"), free],
        "SLO": [
            number("slo.ttft_s", "TTFT", 0.5, 0.05, 10, "s", scale="log"),
            number("slo.tpot_s", "TPOT", 0.03, 0.005, 0.2, "s", scale="log"),
        ],
        "Serving stack": [flag],
    }
    return {"groups": [{"name": name, "controls": each} for name, each in groups.items()]}


def latency_s(rate: float, devices: float) -> float:
    return 0.06 + 0.02 * rate / devices + 0.5 * math.exp((rate - 14 * devices) / 2)


def figures(rate: float, devices: float = 1, spread: float = 0.08) -> dict[str, Any]:
    ttft, tpot = latency_s(rate, devices), 0.007 + 0.0006 * rate / devices

    def of(value: float, unit: str, around: float = spread) -> dict[str, Any]:
        ends = {"low": value * (1 - around), "high": value * (1 + around)} if around else {}
        return {"value": value, **ends, "unit": unit}

    share = 1 / (1 + math.exp((rate - 16 * devices) / 2))
    return {
        "ttft_mean_s": of(0.8 * ttft, "s"),
        "ttft_p50_s": of(0.7 * ttft, "s", 0),
        "ttft_p95_s": of(2 * ttft, "s"),
        "tpot_mean_s": of(tpot, "s"),
        "tpot_p95_s": of(1.3 * tpot, "s", 0),
        "e2e_mean_s": of(ttft + 200 * tpot, "s", 0),
        "e2e_p95_s": of(ttft + 500 * tpot, "s"),
        "requests_per_s": of(rate, "requests/s", 0),
        "goodput_per_s": of(rate * share, "requests/s"),
        "slo_share": of(share, "share", 0),
        "output_tokens_per_s": of(rate * 210, "tokens/s", 0),
        "output_tokens_per_s_per_device": of(rate * 210 / devices, "tokens/s per device", 0),
        "output_tokens_per_s_per_user": of(1 / tpot, "tokens/s per user", 0),
        "kv_used_share": of(min(0.98, 0.05 * rate / devices), "share", 0),
        "prefix_hit_share": of(0.31, "share", 0),
        "devices": of(devices, "devices", 0),
        "cost_per_hour": of(2.99 * devices, "$/h", 0),
        "cost_per_mtoken": of(2.99e6 * devices / (3600 * 210 * rate), "$ per M output tokens", 0),
    }


def of_state(state: dict[str, Any]) -> tuple[float, float]:
    settings = state.get("set", {})
    return float(settings.get("workload.rate_per_s", 6.0)), float(settings.get("deployment.tensor_parallel", 1))


def answer(state: dict[str, Any], kind: str = "exact") -> dict[str, Any]:
    rate, devices = of_state(state)
    times = [float(each) for each in range(0, 400, 2)]
    ttft, tpot = latency_s(rate, devices), 0.007 + 0.0006 * rate / devices
    shares = [each / 100 for each in range(1, 101)]
    spread = {"ttft_s": (ttft, 0.6), "tpot_s": (tpot, 0.2), "e2e_s": (ttft + 200 * tpot, 0.7)}
    source = {
        "name": "h100-sxm hbm_bytes_per_s",
        "value": 3.35e12,
        "unit": "bytes/s",
        "source": "NVIDIA's datasheet",
        "kind": "datasheet",
    }
    step = {
        "name": "vllm step_s",
        "value": 0.0011,
        "unit": "s",
        "source": "fitted to runs of vLLM 0.11, 2025-10-02",
        "kind": "fitted",
        "date": "2025-10-02",
    }
    kernels = {
        "name": "kernels",
        "value": 4,
        "unit": "sets",
        "source": "measured kernels of profile h100-sxm",
        "kind": "measured",
        "date": "2025-11",
    }
    return {
        "key": f"k-{rate}-{devices}",
        "kind": kind,
        "requests": 2500,
        "how": "2,500 requests" if kind == "exact" else "a run of 200 requests",
        "figures": figures(rate, devices, 0.08 if kind == "exact" else 0.2),
        "trust": {
            "tier": "stack and device measured",
            "sentence": "Nine of ten means lie in the intervals.",
            "sources": [source, step, kernels],
        },
        "series": {
            "time_s": times,
            "queued": [max(0.0, rate - 10 + 6 * math.sin(each / 30)) for each in times],
            "running": [rate * 3 + 4 * math.sin(each / 20) for each in times],
            "kv_used_share": [min(0.98, 0.05 * rate * (1 - math.exp(-each / 40))) for each in times],
            "prefix_hit_share": [0.3 + 0.1 * math.sin(each / 50) for each in times],
            "machines": [devices + (each > 200) for each in times],
        },
        "distributions": {
            name: {
                "x": [middle * math.exp(width * math.log(share / (1.005 - share)) / 2) for share in shares],
                "share": shares,
            }
            for name, (middle, width) in spread.items()
        },
        "notes": ["A note about the run."],
        "commands": {
            "scenario": "model: llama-3.1-8b\n",
            "run": "rooftrace run --set workload.rate_per_s=6",
            "server": "vllm serve llama",
            "manifest": "{}",
        },
    }


def refusal(state: dict[str, Any]) -> dict[str, Any] | None:
    layout = state.get("set", {}).get("deployment.tensor_parallel", 1)
    if layout in (1, 2, 4, 8):
        return None
    return {
        "sentence": f"tensor_parallel divides the 32 attention heads of llama-3.1-8b; got {layout}",
        "key": "deployment.tensor_parallel",
    }


def explained(state: dict[str, Any]) -> dict[str, Any]:
    rate, devices = of_state(state)
    tpot = 0.007 + 0.0006 * rate / devices
    parts = {
        "weights": 0.6 * tpot,
        "kv": 0.2 * tpot,
        "host": 0.12 * tpot,
        "arithmetic": 0.05 * tpot,
        "prompts": 0.03 * tpot,
    }
    first = {"arithmetic": 0.03, "queue": 0.02, "weights": 0.01}
    return {
        "sentence": "Memory bandwidth bounds it: of the time that its machines are busy, 60% goes to reading weights.",
        "causes": [{"name": name, "label": f"what {name} takes"} for name in {**parts, **first}],
        "tpot": {
            "mean_s": tpot,
            "parts": parts,
            "slowest": {"mean_s": 2 * tpot, "parts": {**parts, "prompts": 0.03 * tpot + tpot}},
        },
        "ttft": {"mean_s": 0.06, "parts": first, "slowest": {"mean_s": 0.16, "parts": {**first, "queue": 0.12}}},
    }


def candidates(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rate, _ = of_state(state)
    over = state.get("over") or {"deployment.tensor_parallel": [1, 2, 3, 4, 8], "hardware": ["h100-sxm", "a100-80g"]}
    for hardware in over.get("hardware", ["h100-sxm"]):
        for devices in over.get("deployment.tensor_parallel", [1]):
            settings = {"deployment.tensor_parallel": devices, "hardware": hardware}
            name = f"{hardware} tp{devices}"
            if refused := refusal({"set": settings}):
                yield {"name": name, "set": settings, "refused": refused["sentence"]}
                continue
            found = figures(rate, devices * (0.6 if hardware.startswith("a100") else 1))
            found["cost_per_hour"]["value"] = devices * (1.8 if hardware.startswith("a100") else 2.99)
            yield {
                "name": name,
                "set": settings,
                "figures": found,
                "slo": {"kept": found["slo_share"]["value"] > 0.9, "why": "of its one run"},
                "slo_probability": min(1.0, found["slo_share"]["value"]),
                "on_front": hardware.startswith("h100"),
            }


def lines(view: str) -> dict[str, Any]:
    xs = [1, 2, 4, 8, 16, 32, 64]
    theory = {"name": "K = 3", "kind": "theory", "x": xs, "y": [2.6 - 0.02 * x for x in xs]}
    run = {"name": "K = 3", "kind": "simulated", "x": xs, "y": [2.5 - 0.02 * x for x in xs]}
    run.update(low=[y - 0.1 for y in run["y"]], high=[y + 0.1 for y in run["y"]])
    return {
        "title": f"{view} over the batch",
        "x": {"label": "Batch", "unit": "sequences"},
        "y": {"label": "Speed-up", "unit": ""},
        "lines": [theory, run],
    }


def requests(count: int = 300) -> dict[str, Any]:
    rows = range(count)
    ttft = [0.05 + 0.4 * ((row * 37) % 101) / 101 for row in rows]
    return {
        "of": count,
        "columns": {
            "request": list(rows),
            "arrival_s": [400 * row / count for row in rows],
            "queued_s": [each / 4 for each in ttft],
            "ttft_s": ttft,
            "tpot_s": [0.008 + 0.004 * ((row * 17) % 29) / 29 for row in rows],
            "e2e_s": [each + 2 for each in ttft],
            "prompt_tokens": [100 + row for row in rows],
            "output_tokens": [200] * count,
            "slo_met": [each < 0.4 for each in ttft],
        },
    }


BENCH = {
    "name": "mine.json",
    "points": [
        {
            "rate_per_s": rate,
            "measured": {"ttft_p95_s": 2.3 * latency_s(rate, 1), "tpot_mean_s": 0.008 + 0.0006 * rate},
            "simulated": {"ttft_p95_s": 2 * latency_s(rate, 1), "tpot_mean_s": 0.007 + 0.0006 * rate},
            "error": {"ttft_p95_s": -0.13, "tpot_mean_s": -0.09},
        }
        for rate in (2.0, 6.0, 12.0)
    ],
    "notes": ["Lengths are those of the file."],
}


def document(data: dict[str, Any], *, alone: bool = False) -> str:
    """index.html with *data* in it; *alone* with every file of the page in it, as an export has."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    inline = json.dumps(data).replace("<", "\\u003c")
    html = html.replace("<head>", f"<head>\n<script>window.ROOFTRACE = {inline};</script>", 1)
    return inlined(html, PAGE) if alone else html


def recorded(state: dict[str, Any]) -> dict[str, Any]:
    """The data of a frozen page."""
    events: dict[str, Any] = {
        f"/api/{path}": list(EVENTS[path](state)) for path in ("run", "curve", "candidates", "explain")
    }
    events["/api/theory"] = {
        view: [("lines", lines(view))] for view in ("speculation", "chunks", "bubbles", "placement")
    }
    return {
        "name": "made up",
        "controls": controls(),
        "answer": answer(state),
        "frozen": True,
        "state": state,
        "benches": [BENCH],
        "events": events,
        "requests": requests(),
    }


def _run(state: dict[str, Any]) -> Iterator[Event]:
    yield "estimate", answer(state, "estimate")
    yield "exact", answer(state)


def _curve(state: dict[str, Any]) -> Iterator[Event]:
    _, devices = of_state(state)
    rates = [devices * each for each in (2, 4, 6, 8, 10, 12, 14, 16, 18)]
    for kind in ("estimate", "exact"):
        for rate in rates:
            settings = {**state.get("set", {}), "workload.rate_per_s": rate}
            yield (
                "point",
                {
                    "rate_per_s": rate,
                    "kind": kind,
                    "set": settings,
                    "key": f"k-{float(rate)}-{devices}",
                    "figures": figures(rate, devices),
                },
            )
    yield "done", {"knee_per_s": 13 * devices}


def _candidates(state: dict[str, Any]) -> Iterator[Event]:
    rows = list(candidates(state))
    for row in rows:
        yield "candidate", row
    yield "done", {"front": [row["name"] for row in rows if row.get("on_front")]}


def _explain(state: dict[str, Any]) -> Iterator[Event]:
    yield "explained", explained(state)
    for name, tpot, ttft in (
        ("a tenth more bandwidth", -0.06, -0.01),
        ("a tenth more arithmetic", -0.005, -0.05),
        ("a tenth less host time", -0.012, 0.0),
    ):
        yield "what_if", {"name": name, "tpot_share": tpot, "ttft_share": ttft}
    yield "done", {}


def _theory(state: dict[str, Any]) -> Iterator[Event]:
    yield "lines", lines(state["view"])
    yield "done", {}


def _fit(state: dict[str, Any]) -> Iterator[Event]:
    yield (
        "fitted",
        {
            "set": {"workload.rate_per_s": 7.0},
            "before": {"ttft_mean_s": 0.13},
            "after": {"ttft_mean_s": 0.02},
            "runs": 3,
        },
    )


def _compare(state: dict[str, Any]) -> Iterator[Event]:
    one, other = figures(*of_state(state["from"])), figures(*of_state(state))
    change = other["ttft_mean_s"]["value"] / one["ttft_mean_s"]["value"] - 1
    told = {"change": change, "low": change - 0.01, "high": change + 0.01, "unit": "of_a", "verdict": "faster"}
    yield "compared", {"how": "The same 2,500 requests, one by one.", "differences": {"ttft_mean_s": told}}


def fleet(now_s: float, does: str, rate_per_s: float) -> dict[str, Any]:
    """A fleet that is watched."""
    times = [now_s - 60.0 * i for i in range(20, -1, -1)]
    return {
        "now_s": now_s, "interval_s": 60, "where": "http://fleet/metrics", "serves": "vLLM, m",
        "figures": {
            "machines": {"value": 2, "unit": ""}, "running": {"value": 9, "unit": ""}, "waiting": {"value": 4, "unit": ""},
            "arrivals_per_s": {"value": rate_per_s, "unit": "req/s"}, "kv_used_share": {"value": 0.5, "unit": "share"},
        },
        "history": {
            "time_s": times, "rate_per_s": [rate_per_s] * 21, "running": [9] * 21, "waiting": [4] * 21,
        },
        "policy": {
            "name": "kalman", "asks": 3, "goes_to": 3, "looks_again_s": now_s + 60, "does": does,
            "why": ["9 requests ran.", "3 machines serve the forecast."],
            "forecast": {"time_s": [now_s, now_s + 300, now_s + 300, now_s + 600], "rate_per_s": [2.0, 2.0, 3.0, 3.0]},
        },
    }  # fmt: skip


def _watch(_state: dict[str, Any]) -> Iterator[Event]:
    yield "fleet", fleet(1.8e9, "It would start 1 machine.", 2.0)
    yield "fleet", fleet(1.8e9 + 60, "It would leave the 3 machines that there are.", 2.5)
    yield "unread", {"sentence": "http://fleet/metrics does not answer: it is gone"}


EVENTS = {
    "watch": _watch,
    "compare": _compare,
    "run": _run,
    "curve": _curve,
    "candidates": _candidates,
    "explain": _explain,
    "theory": _theory,
    "fit": _fit,
}


@dataclass(kw_only=True)
class Fake:
    """The server, and what it saw."""

    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    held_back: dict[str, threading.Event] = field(default_factory=dict)
    """By path: events after the first wait for this one."""
    data: dict[str, Any] = field(default_factory=dict)
    url: str = ""

    def hold_back(self, path: str) -> threading.Event:
        self.held_back[path] = threading.Event()
        return self.held_back[path]

    def states_asked(self, path: str) -> list[dict[str, Any]]:
        return [state.get("set", {}) for asked, state in self.asked if asked == path]

    def serve(self) -> ThreadingHTTPServer:
        fake = self

        class Handler(_Handler):
            server_facts = fake

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}/"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


class _Handler(BaseHTTPRequestHandler):
    server_facts: Fake

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _send(self, body: bytes, kind: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            data = {"name": "made up", "controls": controls(), "answer": answer({}), **self.server_facts.data}
            self._send(document(data).encode(), TYPES[".html"])
        elif path.startswith("/page/"):
            file = PAGE / path.removeprefix("/page/")
            self._send(file.read_bytes(), TYPES[file.suffix])
        elif path == "/api/requests":
            self._send(json.dumps(requests()).encode(), "application/json")
        else:
            self._send(b"{}", "application/json", 404)

    def do_POST(self) -> None:
        facts = self.server_facts
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path.removeprefix("/api/")
        if path == "bench":
            facts.asked.append(
                (path, {"file": unquote(self.headers["X-File"]), **json.loads(unquote(self.headers["X-State"]))})
            )
            self._send(json.dumps(BENCH).encode(), "application/json")
            return
        state = json.loads(body)
        facts.asked.append((path, state))
        if path == "controls":
            self._send(json.dumps(controls()).encode(), "application/json")
            return
        if path == "export":
            self._send(document(recorded(state), alone=True).encode(), TYPES[".html"])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        refused = refusal(state)
        events = [("refused", refused)] if refused else EVENTS[path](state)
        try:
            for count, (name, data) in enumerate(events):
                if count and path in facts.held_back:
                    self._wait(facts.held_back[path])
                self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            facts.ended.append(path)

    def _wait(self, until: threading.Event) -> None:
        """Until it is set, or the page closes the connection, which a comment in the stream tells."""
        while not until.wait(0.02):
            self.wfile.write(b": still here\n\n")
            self.wfile.flush()
