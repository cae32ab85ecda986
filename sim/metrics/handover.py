"""Where the time of requests went whose prompt was computed on one machine and which were decoded on another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from sim.metrics.requests import finished
from sim.metrics.spread import statistics

STAGES: Mapping[str, tuple[str, str]] = {
    "queue_s": ("arrival_ns", "scheduled_ns"),
    "prefill_s": ("scheduled_ns", "prefilled_ns"),
    "wait_s": ("prefilled_ns", "sent_ns"),
    "transfer_s": ("sent_ns", "landed_ns"),
    "decode_queue_s": ("landed_ns", "joined_ns"),
    "decode_s": ("joined_ns", "finish_ns"),
}
"""The stages of a life, each from one instant to another; they follow each other, and together are the whole of it. `wait_s` is for
room at the decode machine, where that is taken after prefill, and for the link."""


ENCODE_STAGES: Mapping[str, tuple[str, str]] = {
    "queue_s": ("arrival_ns", "encode_begin_ns"),
    "encode_s": ("encode_begin_ns", "encoded_ns"),
    "transfer_s": ("encoded_ns", "encode_landed_ns"),
    "prompt_queue_s": ("encode_landed_ns", "scheduled_ns"),
}
"""The stages of a request before its prompt is computed, the front end in the first; together they are its `queue_s`."""


def grammar_figures(requests: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The entry `structured_output` of a summary: finished requests that waited for a grammar to be compiled, and for how long;
    empty where no answer keeps to one."""
    if "grammar_wait_ns" not in requests:
        return {}
    waits_ns = requests["grammar_wait_ns"][finished(requests)]
    waits_s = waits_ns[waits_ns > 0] * 1e-9
    return {"structured_output": {"waited": len(waits_s), "compile_wait_s": statistics(waits_s)}}


def encode_figures(requests: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The entries `encode` and `images` of a summary: finished requests that were encoded on machines of their own, and their
    `stages` in seconds; images that were `encoded` in steps for finished requests, `hits` that were found encoded, their share of
    both, and `encode_s`, the time of encoding in the steps of each request for which some were encoded. Machines that keep images
    have the same counts. Empty where there is no such thing."""
    if "encode_ns" in requests:
        done = finished(requests)
        steps_s = requests["encode_ns"][done & (requests["encoded_images"] > 0)] * 1e-9
        return {"images": {**_counted(requests, done), "encode_s": statistics(steps_s)}}
    if "encode_landed_ns" not in requests:
        return {}
    over = finished(requests) & (requests["encode_landed_ns"] >= 0)
    stages = {
        name: statistics((requests[end] - requests[begin])[over] * 1e-9) for name, (begin, end) in ENCODE_STAGES.items()
    }
    kept = {"images": _counted(requests, over)} if "encoded_images" in requests else {}
    return {"encode": {"requests": int(over.sum()), "stages": stages, **kept}}


def _counted(requests: Mapping[str, NDArray[Any]], of: NDArray[Any]) -> dict[str, Any]:
    encoded, hits = (int(requests[name][of].sum()) for name in ("encoded_images", "image_hits"))
    return {"encoded": encoded, "hits": hits, "hit_rate": hits / (hits + encoded) if hits + encoded else None}


def handover_figures(requests: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], span_s: float) -> dict[str, Any]:
    """The entry `handover` of a summary; empty where prefill and decode are not apart.

    `requests` that were handed over and finished, and of those `stages`, in seconds, with the share of each in all their time;
    `stayed` finished without; `sent_bytes` of all transfers and `found_tokens` that needed none; `link_use` is the time that links
    were at work over all their places and the span, None where nothing crossed one.
    """
    if "landed_ns" not in requests:
        return {}
    done = finished(requests)
    over = done & (requests["joined_ns"] >= 0)
    whole = float((requests["finish_ns"] - requests["arrival_ns"])[over].sum())
    stages = {}
    for name, (begin, end) in STAGES.items():
        ns = (requests[end] - requests[begin])[over]
        share = float(ns.sum()) / whole if whole else None
        stages[name] = {**statistics(ns * 1e-9), "share": share}
    links = meta.get("links", [])
    places = sum(link["places"] for link in links)
    return {
        "handover": {
            "requests": int(over.sum()),
            "stayed": int((done & ~over).sum()),
            "sent_bytes": int(requests["sent_bytes"].sum()),
            "found_tokens": int(requests["found_at_decode_tokens"].sum()),
            "link_use": sum(link["busy_ns"] for link in links) * 1e-9 / (places * span_s)
            if places and span_s
            else None,
            "stages": stages,
        }
    }
