"""`python -m sglang.launch_server`: its options as settings (release 0.5.23, python/sglang/srt/server_args.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.launch.drafters import assumed
from sim.launch.encoders import by_hand, put_encode, refuse_encoder
from sim.launch.engines.sglang import adapters
from sim.launch.forced import put_mean_length
from sim.launch.reading import Reading, formats
from sim.launch.tiers import GIB, SAY, devices, evicts, host, lmcache_file, lmcache_tiers, lmcache_variables

POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru")
"""Values of --radix-eviction-policy that are policies here: srt/mem_cache/evict_policy.py."""
_HICACHE_RATIO = 2.0
"""Host memory to device memory of SGLang's hierarchical cache where nothing is said, and there is room."""
_METHODS = {"NGRAM": "ngram", "EAGLE": "eagle", "EAGLE3": "eagle", "NEXTN": "mtp", "STANDALONE": "draft_model"}


FORCED_LENGTH = "SGLANG_SIMULATE_ACC_LEN"
"""The variable of release 0.5.23 (srt/environ.py) that forces how many tokens a step yields, the target's own counted."""


def settings(reading: Reading, *, experts: bool) -> None:
    """Put what the command says; *experts*: the model is a mixture of experts."""
    reading.put("serving_stack", "sglang")
    reading.put("scheduler.policy", "sglang")
    formats(reading)
    devices = reading.integer("tp-size") or 1
    ranks = reading.integer("dp-size") or 1
    reading.put("parallel.pipeline", reading.integer("pp-size"))
    if reading.switch("enable-dp-attention") and ranks > 1:
        # The devices of --tp-size are shared among the ranks; elsewhere each rank has as many of its own.
        reading.put("parallel.tensor", max(1, devices // ranks))
        reading.put("parallel.data", ranks)
        _delayer(reading)
    else:
        reading.put("parallel.tensor", devices if devices > 1 else None)
        if ranks > 1:
            reading.put("replicas", ranks)
    spread = reading.integer("ep-size")
    reading.put("parallel.expert", spread if experts and spread and spread > 1 else None)
    reading.longest("context-length")
    rule = reading.text("radix-eviction-policy")
    if rule in POLICIES:
        reading.put("memory.eviction", rule)
    elif rule is not None:
        reading.give_back("radix-eviction-policy", rule)
    # Host memory evicts by the same rule.
    _tiers(reading, evicts(rule) if rule in POLICIES else {})
    mode = reading.text("disaggregation-mode")
    if mode in ("prefill", "decode"):
        reading.took_role(mode, f"--disaggregation-mode {mode}")
        backend = reading.text("disaggregation-transfer-backend") or "mooncake"
        reading.connector = "mooncake_sglang" if backend == "mooncake" else None
    elif mode not in (None, "null"):
        reading.give_back("disaggregation-mode", mode)
    reading.put("memory.mem_fraction_static", reading.number("mem-fraction-static"))
    page = reading.integer("page-size")
    reading.put("memory.block_tokens", page)
    tokens = reading.integer("max-total-tokens")
    reading.put("memory.kv_blocks", None if tokens is None else tokens // (page or 1))
    if reading.switch("disable-radix-cache"):
        reading.put("memory.prefix_caching", False)
        reading.put("scheduler.disable_radix_cache", True)
    reading.put_graphs(
        eager=reading.switch("disable-cuda-graph"),
        largest=reading.integer("cuda-graph-max-bs-decode"),
        sizes=reading.integers("cuda-graph-bs-decode"),
    )
    if reading.switch("enable-eplb"):
        reading.put("experts.placement", "eplb")
        reading.put("experts.redundant", reading.integer("ep-num-redundant-experts"))
    for name in (
        "chunked-prefill-size",
        "max-prefill-tokens",
        "prefill-max-requests",
        "max-running-requests",
        "scheduler-recv-interval",
        "prefill-decode-interval",
        "prefill-decode-interval-min-bs",
    ):
        reading.put(f"scheduler.{name.replace('-', '_')}", reading.integer(name))
    for name in ("enable-mixed-chunk", "disable-overlap-schedule"):
        reading.put(f"scheduler.{name.replace('-', '_')}", reading.switch(name))
    reading.put("scheduler.schedule_policy", reading.text("schedule-policy"))
    reading.put("scheduler.schedule_conservativeness", reading.number("schedule-conservativeness"))
    reading.put("stream_interval", reading.integer("stream-interval"))
    _speculation(reading)
    _adapters_and_encoders(reading)


def _adapters_and_encoders(reading: Reading) -> None:
    adapters.read(reading)
    refuse_encoder(reading, "encoder-only")
    if not reading.switch("language-only"):
        put_encode(reading)
        return
    machines = len(reading.words("encoder-urls")) or "N"
    reading.notes.append(f"--language-only leaves encoding to other machines: {by_hand(machines)}")


def _delayer(reading: Reading) -> None:
    """The delayer of prompts, which is modelled between ranks."""
    if not reading.switch("enable-prefill-delayer"):
        return
    reading.put("scheduler.enable_prefill_delayer", True)
    passes = "prefill-delayer-max-delay-passes"
    reading.put(f"scheduler.{passes.replace('-', '_')}", reading.integer(passes))
    for name in ("token-usage-low-watermark", "queue-min-ratio", "max-delay-ms"):
        reading.put(f"scheduler.prefill_delayer_{name.replace('-', '_')}", reading.number(f"prefill-delayer-{name}"))


def _speculation(reading: Reading) -> None:
    algorithm = reading.text("speculative-algorithm")
    if algorithm is None:
        return
    method = _METHODS.get(algorithm.upper())
    if method is None:
        reading.give_back("speculative-algorithm", algorithm)
        return
    drafter = reading.text("speculative-draft-model-path")
    if algorithm.upper() == "EAGLE" and drafter is None:
        # SGLang drafts by the model's own layers where no checkpoint is named, as with NEXTN.
        method = "mtp"
    reading.put("decoding.method", method)
    steps = reading.integer("speculative-num-steps")
    topk = reading.integer("speculative-eagle-topk") or 1
    tokens = reading.integer("speculative-num-draft-tokens")
    if topk > 1:
        reading.give_back("speculative-eagle-topk", str(topk))
        reading.notes.append(
            f"a tree of drafts (--speculative-eagle-topk {topk}) is taken as a chain of its depth; "
            "decoding.acceptance.tree says more"
        )
    # In a chain the tokens that are verified are the drafted ones and the last of the target's own.
    drafted = steps if steps is not None else None if tokens is None else tokens - 1
    reading.put("decoding.num_speculative_tokens", drafted)
    if method in ("eagle", "mtp"):
        assumed(reading, generation=None if method == "mtp" else algorithm.lower(), drafter=drafter)
    if method == "draft_model":
        reading.put("decoding.draft.model", drafter)
    elif drafter is not None:
        reading.give_back("speculative-draft-model-path", drafter)
    length = reading.variable(FORCED_LENGTH)
    if length is not None and length > 0:
        put_mean_length(reading, length, drafted)


def _tiers(reading: Reading, evicted: Mapping[str, Any]) -> None:
    """The host tier of the hierarchical cache (srt/arg_groups/fields/memory.py): each rank its own, in units of 1e9 bytes."""
    hierarchical = reading.switch("enable-hierarchical-cache")
    size, ratio = reading.integer("hicache-size"), reading.number("hicache-ratio")
    policy, backend = reading.text("hicache-write-policy"), reading.text("hicache-storage-backend")
    if reading.switch("enable-lmcache"):
        file = reading.text("lmcache-config-file")
        values = {**lmcache_file(file), **lmcache_variables(reading.command.aside)}
        values.pop("config_file", None)
        reading.put("memory.tiers", lmcache_tiers(reading, values, "--enable-lmcache") or None)
    if not hierarchical:
        return
    if backend is not None:
        reading.notes.append(SAY.format(where=f"--hicache-storage-backend {backend}", kind="remote"))
    if policy == "write_through_selective":
        reading.give_back("hicache-write-policy", policy)
    written: dict[str, Any] = {"write": "eviction"} if policy == "write_back" else {}
    written |= evicted
    if size:
        reading.put("memory.tiers", [host(size * 1e9 * devices(reading) / GIB, **written)])
    else:
        reading.host_tier = (_HICACHE_RATIO if ratio is None else ratio, {"kind": "host", **written})
