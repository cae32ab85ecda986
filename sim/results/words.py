"""The text of a summary for people: tables of latencies, facts, and the part of a run that figures are over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sim.metrics as metrics
from sim.metrics.trend import TREND_MIN_ARRIVALS
from sim.results.trust import INTERVAL_HEADS, interval_rows, trust_rows
from sim.text import seconds_text

_J_PER_KWH = 3.6e6


class TextTable(NamedTuple):
    """A table for people: its title, which heads the first column, the heads of the others, and texts in rows."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(summary: Mapping[str, Any]) -> list[TextTable]:
    """The tables of a run in the order in which a terminal and a report show them; those without rows are left out."""
    found = [
        TextTable("Latency", LATENCY_HEADS, [(name, *cells) for name, cells in latency_rows(summary)]),
        TextTable("Where the time went", STAGE_HEADS, [(name, *cells) for name, cells in stage_rows(summary)]),
        TextTable(
            "Classes and tenants",
            ("requests", *GROUP_HEADS),
            [(name, n, *cells) for name, n, cells in group_rows(summary)],
        ),
        TextTable("90 % intervals", INTERVAL_HEADS, interval_rows(summary)),
    ]
    return [table for table in found if table.rows]


LATENCY_HEADS = ("mean", "p50", "p90", "p95", "p99", "max")


def latency_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Latencies for a table: a name and a text for each of `LATENCY_HEADS`."""
    names = {
        "ttft_s": "TTFT (first token)",
        "tpot_s": "TPOT (per later token)",
        "itl_s": "ITL (token gap)",
        "e2el_s": "E2EL (whole request)",
        "queue_s": "Queue (encoding is in it)" if "encode" in summary else "Queue (before work starts)",
    }
    return [
        (name, ["-" if summary[key][head] is None else seconds_text(summary[key][head]) for head in LATENCY_HEADS])
        for key, name in names.items()
    ]


GROUP_HEADS = ("TTFT p50", "TTFT p99", "TPOT p99", "E2EL p99", "rejected", "degraded", "in SLO")


def group_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Classes of service and tenants for a table: a name, requests, and a text for each of `GROUP_HEADS`; empty without any."""
    rows = []
    for key, what in (("classes", "class"), ("tenants", "tenant")):
        for name, of in summary.get(key, {}).items():
            times = [of["ttft_s"]["p50"], of["ttft_s"]["p99"], of["tpot_s"]["p99"], of["e2el_s"]["p99"]]
            cells = ["-" if value is None else seconds_text(value) for value in times]
            kept = of["slo_attainment"]
            counts = of["requests"]
            cells += [
                f"{counts['rejected']:,}",
                f"{counts.get('degraded', 0):,}",
                "-" if kept is None else f"{kept:.1%}",
            ]
            rows.append((f"{what} {name}", f"{of['requests']['total']:,}", cells))
    return rows


def limit_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Limits of means and percentiles, and of the requests of classes, beside what was reached, for people; none where there are
    none."""
    found: dict[str, list[str]] = {}
    for name, group in summary.get("classes", {}).items():
        if limits := request_limits_text(group):
            found[f"SLO of {name}"] = [f"{limits} of each request, kept by {group['slo_attainment'] or 0:.1%}"]
    for name, key, limit in metrics.limits_in(summary):
        found.setdefault(f"SLO of {name}" if name else "SLO", []).append(limit_text(key, limit))
    return [(name, "; ".join(texts)) for name, texts in found.items()]


def request_limits_text(group: Mapping[str, Any]) -> str:
    """Limits that each request of a summary, or of a class in it, is held to; empty without any."""
    return limits_text(group.get("request_limits", {}))


def limits_text(limits: Mapping[str, float]) -> str:
    """Limits by their keys in words: 'TTFT at most 1 s, TPOT p95 at most 40 ms'."""
    return ", ".join(f"{_limited(key)} at most {seconds_text(limit_s)}" for key, limit_s in limits.items())


def _limited(key: str) -> str:
    """The figure that a limit is on: 'TTFT p95' of ttft_p95_s."""
    measure, _, statistic = key.removesuffix("_s").partition("_")
    return f"{measure.upper()} {statistic}".strip()


def limit_text(key: str, limit: Mapping[str, Any]) -> str:
    """A limit of a mean or percentile in words: 'TTFT p95 0.81 s, within 1 s'."""
    value = "of no request" if limit["value_s"] is None else seconds_text(limit["value_s"])
    return f"{_limited(key)} {value}, {'within' if limit['kept'] else 'above'} {seconds_text(limit['limit_s'])}"


def window_text(window: Mapping[str, Any]) -> str:
    """Which part of a run the figures of a summary are over, for people."""
    if window["rule"] == "whole":
        return "the whole run, from the first arrival to the last finish"
    how = {"after_warmup": "after warm-up by MSER-5: ", "arrivals": ""}[window["rule"]]
    names = {"itl_s": "ITL", "mfu": "MFU", "mbu": "MBU", "busy_fraction": "busy"}
    whole = [names.get(str(name), str(name)) for name in window["whole_run"]]
    return (
        f"{how}{window['requests']:,} requests that arrive {seconds_text(window['from_s'])} to "
        f"{seconds_text(window['to_s'])} after the first; over the whole run: {', '.join(whole)}"
    )


def over(settings: Mapping[str, Any], axes: Sequence[str] = ()) -> str:
    """Which part of their runs the figures of many are over, for people, by the scenario's *settings*."""
    if any(key.split(".")[0] == "window" for key in axes):
        return "what each point's window says"
    window = settings.get("window", metrics.WHOLE)
    if window["rule"] == "whole":
        return "whole runs, from the first arrival to the last finish"
    if window["rule"] == "after_warmup":
        return "runs after warm-up (MSER-5), to the last arrival; columns window.*"
    end = "the last arrival" if window["to_s"] is None else f"{window['to_s']:g} s"
    return f"requests that arrive from {window['from_s'] or 0:g} s after the first to {end}; columns window.*"


def _prefix_cache(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if found is None or not found["queries"]:
        return []
    return [
        (
            "Prefix cache",
            f"{found['hit_rate']:.1%} of {found['queries']:,} prompt tokens found, {found['evictions']:,} blocks evicted",
        )
    ]


def _fitted(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not found:
        return []
    texts = []
    for quantity in ("tpot", "ttft"):
        # Errors of runs that were left out say more than those of runs that were fitted.
        kind = next((kind for kind in ("left_out", "fitted") if f"{quantity}_error_{kind}" in found), None)
        if kind is not None:
            texts.append(f"{quantity.upper()} {found[f'{quantity}_error_{kind}']:.1%} {kind.replace('_', ' ')}")
    runs = found["runs"]
    errors = f"; mean error {', '.join(texts)}" if texts else ""
    return [("Serving stack", f"{found['file']}, fitted to {runs} run{'s' * (runs != 1)} of {found['of']}{errors}")]


STAGE_HEADS = ("mean", "p50", "p90", "p99", "of all time", "")


def stage_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Where the time of requests went that were handed over, for a table under `STAGE_HEADS`: stage after stage, as a river
    that runs from left to right; none where prefill and decode are not apart."""
    found = summary.get("handover")
    if found is None or not found["requests"]:
        return []
    names = {
        "queue_s": "Queue",
        "prefill_s": "Prefill",
        "wait_s": "Wait for room and link",
        "transfer_s": "Transfer",
        "decode_queue_s": "Decode queue",
        "decode_s": "Decode",
    }
    rows, begin = [], 0.0
    for key, name in names.items():
        stage = found["stages"][key]
        share = stage["share"] or 0.0
        first, last = round(begin * _RIVER), round((begin + share) * _RIVER)
        begin += share
        river = "·" * first + ("█" * (last - first) or "▏")
        texts = ["-" if stage[head] is None else seconds_text(stage[head]) for head in STAGE_HEADS[:4]]
        rows.append((name, [*texts, f"{share:.1%}", river.ljust(_RIVER, "·")[: _RIVER + 1]]))
    return rows


_RIVER = 30
"""Characters that the whole time of a request takes."""


def _rollout(rollout: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if rollout is None:
        return []
    steps, n = rollout["steps"], len(rollout["steps"])
    answers = ", ".join(f"{each:,} {name}" for name, each in rollout["answers"].items() if each or name == "kept")
    if rollout.get("recomputed_tokens"):
        answers += f"; {rollout['recomputed_tokens']:,} tokens computed again"
    if not steps:
        return [("Answers", f"{answers}; when steps ended is not known")]
    mean = {key: sum(each[key] for each in steps) / n for key in ("p90_s", "p99_s", "step_s")}
    ends = [each["begin_s"] + each["step_s"] for each in steps]
    between_s = sum(after["begin_s"] - end for after, end in zip(steps[1:], ends, strict=False)) / max(n - 1, 1)
    apart = f" with {seconds_text(between_s)} between them" if between_s > 0 else ""
    share = rollout["idle_share"]
    idle = "" if share is None else f"; {share:.1%} of the machines' time without work"
    return [
        (
            "Rollout",
            f"{n} step{'s' * (n > 1)}, {seconds_text(mean['step_s'])} each{apart}: 90 % of the answers after "
            f"{seconds_text(mean['p90_s'])}, 99 % after {seconds_text(mean['p99_s'])}",
        ),
        (
            "Tail",
            f"{rollout['tail_share']:.1%} of the time for the last tenth{idle}",
        ),
        ("Answers", answers),
    ]


def _encode(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not found or not found["requests"]:
        return []
    queued, encoded, sent, *again = (seconds_text(stage["mean"]) for stage in found["stages"].values())
    then = f", then queued for {again[0]}" if again else ""  # results of older versions do not say it
    return [
        (
            "Encoded",
            f"{found['requests']:,} requests, queued for {queued} on average, encoded in {encoded}, sent in {sent}{then}",
        ),
        *([("Images and speech", _counted(found["images"]))] if "images" in found else []),
    ]


def _counted(images: Mapping[str, Any]) -> str:
    share = "" if images["hit_rate"] is None else f" ({images['hit_rate']:.1%})"
    return f"{images['encoded']:,} encoded, {images['hits']:,} found encoded{share}"


_MANY_WAIT = 1.0
"""From so many requests that wait for a slot on average, the command that chooses the number of slots is named."""


def _adapters(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not found or found["running_mean"] is None:
        return []
    waiting, loads = (
        found["waiting_for_slot_mean"],
        [f"{found['slot_loads']:,} to slots in {seconds_text(found['slot_load_s'])}"],
    )
    if found["disk_loads"]:
        loads.insert(0, f"{found['disk_loads']:,} from disk in {seconds_text(found['disk_load_s'])}")
    text = (
        f"{found['running_mean']:.3g} of {found['max_loras']} slots in use on average, {found['running_max']} at most"
    )
    if waiting:
        text += f"; {waiting:,.3g} requests waiting for a slot on average"
    if waiting >= _MANY_WAIT:
        text += " (rooftrace advise --only adapters says how many to set)"
    return [("Adapters", text), ("Adapter loads", ", ".join(loads))]


def _images(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not found or found["hit_rate"] is None:
        return []
    mean = f"; encoding takes {seconds_text(found['encode_s']['mean'])} of a request's steps on average"
    taken = mean if found["encoded"] else ""
    return [("Images and speech", _counted(found) + taken)]


def _structured(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    waits = found["compile_wait_s"]
    told = (
        f", {seconds_text(waits['mean'])} on average, at most {seconds_text(waits['max'])}" if found["waited"] else ""
    )
    return [("Grammars", f"{found['waited']:,} requests waited for theirs to be compiled{told}")]


def _handover(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    use = "" if found["link_use"] is None else f", links busy {found['link_use']:.1%}"
    text = f"{found['requests']:,} requests, {found['sent_bytes'] / 1e9:,.4g} GB of KV{use}"
    text += f", {found['found_tokens']:,} tokens found and not sent" if found["found_tokens"] else ""
    text += f"; {found['stayed']:,} stayed on one machine" if found["stayed"] else ""
    return [("Handed over", text)]


def _kv_tiers(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for kind in metrics.TIER_KINDS:
        tier = None if found is None else found.get(kind)
        if tier is None:
            continue
        text = (
            "nothing was looked up" if tier["hit_rate"] is None else f"{tier['hit_rate']:.1%} of prompt tokens loaded"
        )
        if tier.get("loads"):
            text += f", {tier['loads']:,} loads of {tier['load_bytes'] / 1e9:,.1f} GB, {seconds_text(tier['load_mean_s'])} each"
        if tier.get("stores"):
            text += f", {tier['stores']:,} stores of {tier['store_bytes'] / 1e9:,.1f} GB"
        rows.append((f"KV tier {kind}", text))
    if found is not None and found["swapped_tokens"]:
        rows.append(("Swapped", f"{found['swapped_tokens']:,} tokens of preempted sequences came back from the host"))
    return rows


def _ranks(ranks: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Facts about how evenly ranks were filled; nothing where there are none."""
    if ranks is None or not ranks["steps"]:
        return []
    text = f"the fullest has {ranks['token_imbalance']:.2f} times the mean tokens of a step"
    if ranks["kv_imbalance"] is not None:
        text += f", and {ranks['kv_imbalance']:.2f} times the KV that decodes read"
    return [("Ranks", f"{text}; {ranks['idle_share']:.1%} idle while others step")]


def _fleet(fleet: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Machines that come, go and fail; nothing where all are there from beginning to end."""
    if fleet is None:
        return []
    seconds = fleet["machine_s"]
    parts = [
        f"{seconds[name] / 3600:,.2f} {name}" for name in ("ready", "starting", "draining", "failed") if seconds[name]
    ]
    rows = [
        ("Machine-hours", f"{fleet['machine_hours']:,.2f}: {', '.join(parts)}; {fleet['machines_max']} ready at most")
    ]
    if fleet["starts"] or fleet["drains"]:
        back = f", {fleet['called_back']:,} called back while they drained" if fleet["called_back"] else ""
        rows.append(("Autoscaling", f"{fleet['starts']:,} starts, {fleet['drains']:,} drains{back}"))
    asked = fleet["requests"]
    if fleet["failures"]:
        ends = [f"{asked[name]:,} requests {name}" for name in ("resumed", "retried", "lost") if asked[name]]
        if asked["chosen_again"]:
            ends.append(f"{asked['chosen_again']:,} that took room elsewhere")
        availability = "-" if fleet["availability"] is None else f"{fleet['availability']:.2%}"
        rows.append(("Failures", ", ".join([f"{fleet['failures']:,}", f"availability {availability}", *ends])))
    if asked["held"] or fleet["without_machine_s"]:
        text = f"{seconds_text(fleet['without_machine_s'])}: {asked['held']:,} requests were held for one"
        if asked["held"]:
            text += f", {seconds_text(fleet['held_s']['max'])} at most"
        if asked["held_to_the_end"]:
            text += f", {asked['held_to_the_end']:,} to the end of the run"
        rows.append(("No machine ready", text))
    return rows


def _steps(summary: Mapping[str, Any]) -> str:
    return f" of ranks, {summary['ranks']['steps']:,} steps" if "ranks" in summary else ""


def _costs(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    hours = f"{_digits(found['device_hours'])} device-hours"
    rows = []
    if found["usd"] is not None:
        if found.get("usd_per_hour") is not None:
            each = f"{money(found['usd_per_hour'])} an hour, {money(found['usd_per_month'])} a month of 730 h"
            rows += [("Deployment", each), ("Prices", found["price_basis"])]
        parts = f"${_digits(found['usd'])} for {hours}"
        if found["usd_per_m_output"] is not None:
            parts += f", ${_digits(found['usd_per_m_output'])} per million output tokens"
        if found["usd_per_m_input"] is not None and found["usd_per_m_generated"] is not None:
            parts += f"; divided: ${_digits(found['usd_per_m_input'])} input, ${_digits(found['usd_per_m_generated'])} output"
        rows.append(("Cost", parts))
    else:
        rows.append(("Cost", f"{hours}; no price is known: costs.usd_per_device_hour"))
    of_classes = {name: each for name, each in found.get("classes", {}).items() if each["usd"]}
    if of_classes:
        texts = [
            f"{name} ${_digits(each['usd'])} ({each['usd'] / found['usd']:.0%}), {_price(each['usd_per_m_input'])} input, "
            f"{_price(each['usd_per_m_generated'])} output"
            for name, each in of_classes.items()
        ]
        rows.append(("Cost by class", f"{'; '.join(texts)} per million tokens"))
    kwh = {name: found[name] / _J_PER_KWH for name in ("joule", "joule_low", "joule_high", "tdp_joule")}
    energy = (
        f"{_digits(kwh['joule'])} kWh ({_digits(kwh['joule_low'])} to {_digits(kwh['joule_high'])}; "
        f"at the limit {_digits(kwh['tdp_joule'])})"
    )
    for name, unit in (("joule_per_output_token", "J per output token"), ("mean_w", "W in the mean")):
        if found[name] is not None:
            low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
            ends = "" if low is None or high is None else f" ({_digits(low)} to {_digits(high)})"
            energy += f", {_digits(found[name])} {unit}{ends}"
    if found["carbon_g"] is not None:
        energy += f", {_digits(found['carbon_g'])} g of carbon"
    return [*rows, ("Energy", f"{energy}; {found['power_basis']}")]


def _digits(value: float) -> str:
    """Three digits, and all those before the point: '0.456', '3,126'."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"


def money(usd: float) -> str:
    """US dollars for people, whole where they are many: '$6.88', '$5,022'."""
    return f"${usd:,.0f}" if usd >= 1000 else f"${usd:,.2f}" if usd >= 1 else f"${usd:,.3g}"


def _price(usd: float | None) -> str:
    return "-" if usd is None else f"${usd:,.3g}"


def _degraded(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    if "degraded" not in counts:
        return []
    lack = f"{counts['shortened_tokens']:,} output tokens left out"
    return [("Degraded", f"{counts['degraded']:,} finished with an answer cut to a length; {lack}")]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def _requests(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows that say what became of the requests, how fast, and within which limits."""
    counts = summary["requests"]
    ends = [
        f"{counts[key]:,} {key}"
        for key in ("finished", "rejected", "aborted", "lost", "unfinished")
        if key == "finished" or counts.get(key)
    ]
    rows = [
        ("Requests", f"{counts['total']:,}: " + ", ".join(ends)),
        ("Figures over", window_text(summary.get("window", metrics.WHOLE))),
        *_degraded(counts),
        ("Request throughput", _rate(summary["requests_per_s"], "requests/s")),
        ("Output throughput", _rate(summary["output_tokens_per_s"], "tokens/s")),
        ("Total throughput", _rate(summary["total_tokens_per_s"], "tokens/s (prompt and output)")),
    ]
    if summary["slo_attainment"] is not None:
        good = _rate(summary["goodput_requests_per_s"], "requests/s")
        limits = request_limits_text(summary)
        held = f" ({limits})" if limits else ""
        rows.append(("Within the SLO", f"{_share(summary['slo_attainment'])} of requests{held}, goodput {good}"))
    return [*rows, *limit_rows(summary)]


def _fairness(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    fairness = summary.get("fairness", {}).get("jain")
    if fairness is None or len(summary["tenants"]) < 2:
        return []
    text = f"{fairness:.3f} of 1 over {len(summary['tenants'])} tenants, of service by weight until the last arrival"
    return [("Jain's fairness", text)]


def _models(models: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, model in models.items():
        first, whole = model["ttft_s"]["p99"], model["e2el_s"]["p99"]
        texts = [f"{model['requests']['total']:,} requests"]
        texts += [] if first is None else [f"p99 TTFT {seconds_text(first)}"]
        texts += [] if whole is None else [f"p99 E2EL {seconds_text(whole)}"]
        texts += [] if model["slo_attainment"] is None else [f"{_share(model['slo_attainment'])} within the SLO"]
        rows.append((name, ", ".join(texts)))
    return rows


def _speculation(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if found is None or not found["num_drafts"]:
        return []
    return [
        (
            "Speculation",
            f"{found['mean_acceptance_length']:.2f} tokens a round, "
            f"{_share(found['draft_acceptance_rate'])} of drafted tokens accepted, alpha {found['alpha']:.3f}",
        ),
        ("Accepted by position", ", ".join(_share(rate) for rate in found["acceptance_rate_per_pos"])),
    ]


_SATURATED = {
    True: "yes: the queue still grows when arrivals end",
    False: "no",
    None: f"cannot be said: it takes {TREND_MIN_ARRIVALS} arrivals, one after another, in the second half of their time",
}


def fact_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything of the summary but the latencies, for people: pairs of name and text."""
    kv = summary["kv_utilization"]
    rows = [
        *_requests(summary),
        (
            "Simulated time",
            f"{seconds_text(summary['makespan_s'])} in {summary['iterations']:,} iterations{_steps(summary)}",
        ),
        ("Busy", f"{_share(summary['busy_fraction'])}, MFU {_share(summary['mfu'])}, MBU {_share(summary['mbu'])}"),
        ("KV memory in use", f"{_share(kv['mean'])} on average, {_share(kv['max'])} at most"),
        ("Preemptions", f"{summary['preemptions']:,}"),
        *([("Scheduled by", ", ".join(summary["releases"]))] if "releases" in summary else []),
        *_fleet(summary.get("fleet")),
        *_ranks(summary.get("ranks")),
        *_prefix_cache(summary.get("prefix_cache")),
        *_adapters(summary.get("adapters")),
        *_encode(summary.get("encode")),
        *_images(summary.get("images")),
        *_structured(summary.get("structured_output")),
        *_handover(summary.get("handover")),
        *_kv_tiers(summary.get("kv_tiers")),
        *_rollout(summary.get("rollout")),
        ("Saturated", _SATURATED[summary["saturated"]]),
        *_costs(summary.get("costs")),
        *_fairness(summary),
        *_models(summary.get("models", {})),
        *_fitted(summary.get("fitted_stack")),
        *_speculation(summary.get("speculation")),
        *trust_rows(summary),
    ]
    if summary["wall_s"] is not None:
        rows.append(("Spent simulating", seconds_text(summary["wall_s"])))
    return rows
