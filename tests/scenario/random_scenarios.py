"""Random scenarios over all that a scenario file can say, small: `draw` gives one as a mapping, `write_files` the files they name.

A combination that is known to be refused is not drawn; what is refused all the same is refused in one sentence, and rarely.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from hwmodels.device import load_device

Mapping = dict[str, Any]


class _Model(NamedTuple):
    name: str
    hardware: tuple[str, ...]
    tensor: tuple[int, ...]
    pipeline: tuple[int, ...] = (1,)
    ranks: tuple[int, ...] = ()
    """Degrees of data-parallel attention, each with as many groups of experts; of mixtures of experts alone."""
    mtp: bool = False


_MODELS = (
    _Model("llama-3.2-1b", ("h100-sxm", "a100-80gb-sxm", "l40s", "b200", "mi300x", "tpu-v5e"), (1, 2), (1, 1, 2, 3)),
    _Model("qwen3-0.6b", ("h100-sxm", "l4", "a10", "h200"), (1, 1, 2), (1, 1, 2)),
    _Model("opt-125m", ("v100-16", "rtx-4090", "h100-pcie"), (1,), (1, 1, 3)),
    _Model("llama-3.1-8b", ("h100-sxm", "a100-80gb-sxm", "h20", "gb200"), (1, 2), (1, 1, 4)),
    _Model("gemma-3-1b", ("h100-sxm", "l40s"), (1,), (1, 2)),
    _Model("gpt-oss-20b", ("h100-sxm", "b200"), (1, 2), (1, 1, 2), (2, 4)),
    _Model("qwen3-30b-a3b", ("h100-sxm", "h200"), (1, 2), (1, 1, 2), (2, 4)),
    _Model("mixtral-8x7b", ("h100-sxm", "a100-80gb-sxm"), (2, 4), (1,), (4,)),
    _Model("qwen3-next-80b-a3b", ("h200", "h100-sxm"), (4,)),
    _Model("deepseek-v3", ("h200", "b200"), (8,), (1,), (8,), mtp=True),
)
_WEIGHTS = (8, 4, 2, 4, 2, 2, 3, 1, 1, 2)
_DENSE = ("llama-3.2-1b", "qwen3-0.6b")
_CLASSES = ("chat", "batch")
TRACES = 8
"""Traces in the plain format, each with other columns."""
_LONGEST = 60
"""Output tokens, of all workloads."""


def _some(rng: Random, often: float, /, **values: list[Any]) -> Mapping:
    """Some of these settings, each with this probability, and a value of each."""
    return {key: rng.choice(choices) for key, choices in values.items() if rng.random() < often}


def write_files(folder: Path) -> None:
    """Write the files that scenarios of `draw` name into *folder*: the same for every scenario."""
    for number in range(TRACES):
        _write_trace(folder / f"trace-{number}.csv", Random(number), number)
    rng = Random(99)
    _write_jsonl(folder / "mooncake.jsonl", _mooncake(rng))
    _write_components(folder, rng)
    _write_jsonl(folder / "sessions.jsonl", _sessions(rng))
    steps = [f"{b},1,{c},{4 + b / 50 + b * c / 3e5}" for b in (1, 8, 9, 40) for c in (20, 900)]
    steps += [f"1,{n},{c},{5 + n / 60 + n * c / 1e7}" for n in (16, 300, 2000) for c in (0, 800)]
    head = "backend,batch_size,new_tokens,cached_tokens,latency_ms"
    (folder / "steps.csv").write_text("\n".join([head, *(f"a,{row}" for row in steps), "b,1,8,0,3.0"]) + "\n")
    (folder / "popularity.txt").write_text("\n".join(str(1 + i % 7) for i in range(128)) + "\n")
    rows = [f"{i // 3 / 10},{100 + 10 * i},{5 + i}" for i in range(24)]
    (folder / "tenths.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    (folder / "rates.csv").write_text("start_s,rate_per_s\n0,40\n1,5\n2,80\n3,0\n")
    rows = [f"{i},{r},{rng.randrange(4)}" for i in range(5) for r in range(4 * _LONGEST)]
    (folder / "accepted.csv").write_text("request,round,accepted\n" + "\n".join(rows) + "\n")
    groups = [
        {"inter_op": 1, "intra_op": 1, "models": list(_DENSE)},
        {"inter_op": 2, "intra_op": 1, "models": [_DENSE[0]]},
    ]
    (folder / "placement.json").write_text(json.dumps({"format": "rooftrace-placement-1", "groups": groups}))
    text = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    text |= {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936, "max_position_embeddings": 40_960}
    audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 256}
    hears = {"model_type": "qwen2_audio", "text_config": text, "audio_config": audio}
    (folder / "hears.json").write_text(json.dumps(hears))
    _write_servegen(folder)
    _write_jsonl(folder / "export.jsonl", _exported(rng))
    (folder / "prices.toml").write_text(
        '[providers]\nours = "our contract"\n\n[devices]\n'
        'h100-sxm = [{ provider = "ours", usd_per_hour = 2.0, listed = "one", seen = "2026" }]\n'
    )


def _exported(rng: Random) -> list[Mapping]:
    """Rows of a gateway's log, of which some failed and some do not say how long the answer was."""
    rows: list[Mapping] = []
    for i in range(40):
        usage = {"in": rng.randint(1, 400), **({} if i % 5 == 3 else {"out": rng.randint(1, _LONGEST)})}
        status = "error" if i % 9 == 4 else "success"
        rows.append({"at": 1_790_000_000 + i / 40, "usage": usage, "limit": 60, "status": status})
    return rows


def _columns(number: int) -> dict[str, bool]:
    """Which columns beside the lengths trace *number* has."""
    return {
        "deadline_s": number in (1, 3, 7),
        "session": number in (2, 3, 7),
        "priority": number in (1, 4, 7),
        "max_tokens": number in (5, 7),
        "abort_s": number in (3, 4, 6),
        "class": number in (4, 7),
        "tenant": number in (5, 7),
        "predicted_tokens": number in (6, 7),
        "encoder_tokens": number in (0, 7),
        "prefix_blocks_16": number in (2, 3, 6, 7),
        "adapter": number in (5, 6),
    }


def _write_trace(path: Path, rng: Random, number: int) -> None:
    has = [name for name, there in _columns(number).items() if there]
    at_s = 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens", *has])
        for row in range(80):
            at_s += 0.0 if rng.random() < 0.2 else rng.expovariate(40)
            group, shared = rng.randrange(4), rng.randrange(0, 12)
            prompt, output = 16 * shared + rng.randrange(1, 200), rng.randrange(0 if number == 6 else 1, _LONGEST)
            ids = [1000 * group + i for i in range(shared)]
            if rng.random() < 0.2:
                ids = [rng.randrange(10**6, 10**9) for _ in range(-(-(prompt + output) // 16))]
            values = {
                "deadline_s": rng.choice(["", f"{rng.uniform(0.05, 2):.6f}"]),
                "session": rng.choice(["", group]),
                "priority": rng.randrange(3),
                "max_tokens": rng.choice([output, output + 20, _LONGEST]),
                "abort_s": rng.choice(["", "", f"{rng.uniform(0.01, 1):.6f}"]),
                "class": _CLASSES[rng.random() < 0.4],
                "tenant": f"t{rng.randrange(3)}",
                "predicted_tokens": max(1, output + rng.randrange(-5, 20)),
                "encoder_tokens": prompt % 3 * 100,
                "prefix_blocks_16": " ".join(map(str, ids)),
                "adapter": ["", 0, 1, 0, 2][row % 5],
            }
            writer.writerow([f"{at_s:.9f}", prompt, output, *(values[name] for name in has)])


def _write_jsonl(path: Path, rows: list[Mapping]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_components(folder: Path, rng: Random) -> None:
    """Prompts of components, and the tokens of each beside them."""
    tokens = {each: rng.randrange(0, 200) for each in range(20)}
    rows = []
    for i in range(40):
        kinds = {"system": [rng.randrange(3)], "passage": rng.sample(range(3, 12), 3), "user": [rng.randrange(12, 20)]}
        length = 8 + sum(tokens[each] for ids in kinds.values() for each in ids)
        rows.append(
            {"timestamp": 30 * i, "input_length": length, "output_length": rng.randrange(1, 20), "hash_ids": kinds}
        )
    _write_jsonl(folder / "rag_components.jsonl", rows)
    table = "".join(f"{each},{n}\n" for each, n in tokens.items())
    (folder / "rag_component_lengths.csv").write_text("id,tokens\n" + table)


def _mooncake(rng: Random) -> list[Mapping]:
    rows = []
    for i in range(60):
        group, shared, own = 100 * rng.randrange(3), rng.randrange(3), rng.randrange(1, 3)
        ids = [*range(group, group + shared), *range(10_000 + 10 * i, 10_000 + 10 * i + own)]
        prompt = 512 * len(ids) - rng.randrange(512)
        rows.append(
            {"timestamp": 25 * i, "input_length": prompt, "output_length": rng.randrange(1, 40), "hash_ids": ids}
        )
    return rows


def _sessions(rng: Random) -> list[Mapping]:
    rows: list[Mapping] = []
    for session in range(12):
        tokens = 64 * rng.randrange(1, 6)
        for turn in range(rng.randrange(1, 7)):
            tokens += rng.randrange(10, 150)
            ids = [1000 * session + i for i in range(-(-tokens // 64))]
            output = rng.randrange(1, 50)
            row = {
                "session_id": session,
                "agent": 0,
                "request": turn,
                "timestamp": 900 * turn,
                "delay": rng.randrange(0, 900),
            }
            rows.append({**row, "input_length": tokens, "output_length": output, "hash_ids": ids})
            tokens += output
    return rows


def _write_servegen(folder: Path) -> None:
    import pandas as pd

    arrivals = [("m", client, 0, 0.03 * (client + 1), family, 0.7) for client, family in ((0, "Gamma"), (1, "Weibull"))]
    lengths = [
        ("m", client, 0, field, value, 0.5)
        for client in (0, 1)
        for field, values in (("input_tokens", (50, 300)), ("output_tokens", (5, 40)))
        for value in values
    ]
    names = ["model", "client", "window_start_s", "rate_req_s", "family", "shape"]
    pd.DataFrame(arrivals, columns=names).to_parquet(folder / "arrivals.parquet")
    names = ["model", "client", "window_start_s", "field", "value", "probability"]
    pd.DataFrame(lengths, columns=names).to_parquet(folder / "lengths.parquet")


class _Load(NamedTuple):
    """A workload and what the rest of a scenario has to know of it."""

    settings: Mapping
    closed: bool = False
    arrives: bool = True
    """All arrivals are known in advance."""
    ids: bool = False
    columns: frozenset[str] = frozenset()
    longest: int = 500
    """Tokens of prompt and output, about."""
    slow: bool = False
    """Lasts for minutes rather than seconds."""


def draw(rng: Random) -> Mapping:
    """A scenario, as in a file."""
    load = _a_load(rng)
    found: Mapping = {"seed": rng.randrange(1000), "workload": load.settings}
    stack = rng.choice(["vllm"] * 5 + ["sglang", "sglang", "trtllm", "trtllm", "eager", "ideal"])
    roofline = rng.random() < 0.12
    if stack != "vllm" or rng.random() < 0.3:
        found["serving_stack"] = stack
    if roofline:
        found["cost_model"] = "roofline"
    elif rng.random() < 0.1 and stack in ("vllm", "sglang", "trtllm"):
        found["serving_release"] = {"vllm": "0.12", "sglang": "0.5.10", "trtllm": "1.0"}[stack]
    if rng.random() < 0.2:
        found["stream_interval"] = rng.choice([2, 4, 7])
    if rng.random() < 0.1:
        found["gateway"] = _some(rng, 0.6, delay_s=[0.0, 0.02], delay_s_per_token=[1e-6, 1e-4], tokenizes=[True])
    around = _Around(rng, load, stack, roofline)
    classes = around.classes(found)
    fleet = rng.choice(["one"] * 5 + ["pools"] * 3 + ["apart"] * 4 + ["placement"])
    if load.closed and fleet in ("placement",):
        fleet = "one"
    getattr(around, fleet)(found, classes)
    around.common(found)
    if not {"pools", "placement"} & set(found) and rng.random() < 0.1:
        found["memory"]["max_model_len"] = max(64, int(load.longest * rng.choice([0.6, 0.9, 1.5])))
    late = {"event_delay_s", "poll_s"} & set(str(found.get("router")).split("'"))
    if not late and (own := Random(str(found))).random() < 0.2:
        found["encode"] = _encoders(own, load)
    elif not late and found.get("model") == "qwen3-0.6b" and "prompt_tokens" in load.settings and own.random() < 0.7:
        _imaged(own, found)
    if (own := Random(f"stops of {found}")).random() < 0.5:
        _stop_machines(own, found)
    if (own := Random(f"context of {found}")).random() < 0.3:
        _share_context(own, found)
    if "'data'" not in str(found) and (own := Random(f"grammars of {found}")).random() < 0.2:
        found["structured_output"] = _some(
            own, 0.4, share=[0, 0.3], grammars=[5, 100], exponent=[1.2], compile_s=[0, 0.3], threads=[1], kept=[2],
            mask_s=[1e-4], apply_s=[1e-5], overlapped=[False], library=["xgrammar"],
        )  # fmt: skip
    if (own := Random(f"adapters of {found}")).random() < 0.8:
        _ask_for_adapters(own, found, load)
    return found


def _forecast_settings(rng: Random, policy: str) -> dict:
    """Settings that a forecast of this kind alone has."""
    own: dict = {
        "kalman": {"level": [0.3], "trend": [0.01], "damping": [0.9], "remembered_s": [3600.0]},
        "seasonal_naive": {"season_s": [40.0, 60.0], "seasons": [2]},
        "holt_winters": {"season_s": [40.0], "seasons": [3], "level": [0.2], "trend": [0.05], "season": [0.1]},
    }
    return _some(rng, 0.4, **own.get(policy, {}))


def _stop_machines(rng: Random, found: Mapping) -> None:
    """Have machines stand still between the steps of a rollout, where that is modelled."""
    rollout, text = found["workload"].get("rollout"), str(found)
    if rollout is None or any(
        word in text
        for word in ("'tiers'", "'role'", "'autoscale'", "'failures'", "'encode'", "event_delay_s", "poll_s")
    ):
        return
    rollout |= _some(rng, 0.6, pause_s=[0.0, 0.3], redistribute=[0.2, 0.8])
    if "informative" not in rollout:
        rollout["leftover"] = rng.choice(["continue", "recompute", "abort"])


def _share_context(rng: Random, found: Mapping) -> None:
    """Have devices of the one deployment share prompts or KV, where that is modelled."""
    parallel, memory = found.get("parallel", {}), found.get("memory", {})
    plain = found.get("model") in (
        "llama-3.2-1b",
        "qwen3-0.6b",
        "llama-3.1-8b",
        "qwen3-30b-a3b",
        "mixtral-8x7b",
        "deepseek-v3",
    )
    alone = found.get("serving_stack", "vllm") in ("vllm", "ideal") and not {"pools", "placement"} & set(found)
    drafts = found.get("decoding", {}).get("method", "ngram") not in ("ngram", "autoregressive", "medusa")
    if (
        not plain
        or not alone
        or drafts
        or "tiers" in memory
        or "data" in parallel
        or not isinstance(found["hardware"], str)
    ):
        return
    if found["hardware"].startswith("tpu"):
        return
    if found["model"] == "deepseek-v3" and rng.random() < 0.7:
        parallel["decode_context"] = rng.choice([2, 4, 8])
        if rng.random() < 0.5:
            parallel["kv_interleave"] = rng.choice([1, 4])
    else:
        parallel["prefill_context"] = rng.choice([2, 3])
        if "expert" in parallel:
            parallel["prefill_context"], parallel["expert"] = 2, 2 * parallel["expert"]


_WITHOUT_ADAPTERS = (
    "'data'", "'role'", "'pools'", "'placement'", "'trtllm'", "'preempt'", "event_delay_s", "poll_s", "'retries': None",
)  # fmt: skip
"""Words of a scenario in which adapters are not modelled, of routers that adapters leave no choice, and of requests that are tried
for ever."""


def _ask_for_adapters(rng: Random, found: Mapping, load: _Load) -> None:
    """Have requests ask for LoRA adapters, where that is modelled."""
    text = str(found)
    plain = found.get("model") in ("llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b")
    staged = found.get("parallel", {}).get("pipeline", 1) > 1 or found.get("micro_batches", 1) > 1
    if not plain or staged or any(word in text for word in _WITHOUT_ADAPTERS):
        return
    count = rng.choice([1, 3, 8])
    adapters = found["adapters"] = {"count": count} | _some(
        rng, 0.4, rank=[16, [8, 64][:count], {"ranks": [8, 32], "shares": [0.7, 0.3]}], max_loras=[1, 2, 4],
        target_modules=[["all"], ["q_proj", "v_proj"]], loaded_at_start=[False],
    )  # fmt: skip
    if "adapter" in load.columns:
        adapters["popularity"] = "trace"
        adapters["count"] = max(count, 3)
    else:
        adapters |= _some(rng, 0.5, popularity=[{"zipf": 1.1}, {"shares": [2] * count}, "uniform"], base_share=[0.3])
    if found.get("serving_stack") == "sglang":
        adapters |= _some(rng, 0.4, eviction=["fifo", "lru"], max_cpu_loras=[8, 9], max_lora_rank=[65])
    else:
        adapters |= _some(rng, 0.4, max_cpu_loras=[4, 9], max_lora_rank=[64])
    if "router" in found and "autoscale" not in text:
        if rng.random() < 0.3:
            adapters["placement"] = "apart"
        elif rng.random() < 0.5:
            found["router"] = rng.choice(
                [
                    {"policy": "adapter", "inner": "round_robin"}
                    | rng.choice([{}, {"apart": True, "each": min(2, found.get("replicas", 1))}]),
                    {"policy": "llm_d", "adapter": 2.0},
                ]
            )


def _imaged(rng: Random, found: Mapping) -> None:
    """Have prompts hold images or speech, which a model of the same shape encodes in its steps or on machines of their own."""
    key, size = (
        "images",
        {"width": rng.choice([300, {"distribution": "uniform", "min_tokens": 64, "max_tokens": 500}]), "height": 200},
    )
    found["model"] = "qwen3-vl-2b"
    if Random(str(found)).random() < 0.3:
        found["model"], key, size = "hears.json", "audio", {"milliseconds": rng.choice([4000, 31_000])}
    media = size | _some(rng, 0.5, per_request=[0, 2], distinct=[5], after_tokens=[30])
    found["workload"][key] = media | (_some(rng, 0.5, zipf=[1.0]) if "distinct" in media else {})
    ranks = found.get("parallel", {}).get("data", 1) > 1
    scheduler = str(found.get("scheduler", {"policy": "vllm"}))
    if ("'vllm'" in scheduler or "'sglang'" in scheduler) and not ranks and rng.random() < 0.7:
        own = _some(rng, 0.7, cache_tokens=[400])
        found["encode"] = {
            "at": "engine",
            **own,
            **(_some(rng, 0.7, budget_tokens=[50, 300]) if "'vllm'" in scheduler else {}),
        }
    else:
        own = _some(rng, 0.5, max_batch=[3], hardware=["l40s"], tensor=[2], cache_tokens=[200, 5000])
        found["encode"] = {"bandwidth_gb_per_s": 10, **own}


def _encoders(rng: Random, load: _Load) -> Mapping:
    found: Mapping = {
        "token_s": rng.choice([0, 1e-5, 1e-4]),
        "bandwidth_gb_per_s": rng.choice([0.1, 10]),
        "bytes_per_token": 8192,
    }
    if "encoder_tokens" not in load.columns:
        found["encoder_tokens"] = rng.choice([1, 500])
    return found | _some(
        rng, 0.4, replicas=[2, 3], request_s=[1e-3], batch_s=[5e-3], max_batch=[4], latency_s=[1e-3], router=["least_outstanding"],
    )  # fmt: skip


class _Around:
    """Draws the parts of one scenario."""

    def __init__(self, rng: Random, load: _Load, stack: str, roofline: bool) -> None:
        self.rng, self.load, self.stack, self.roofline = rng, load, stack, roofline
        self.ranks = False
        self.machines = 0

    # What there is of machines.

    def one(self, found: Mapping, classes: Mapping) -> None:
        rng = self.rng
        model = rng.choices(_MODELS, _WEIGHTS)[0]
        found |= self._machine(model, classes)
        found["replicas"] = rng.choice([1, 1, 2, 3, 4])
        self.machines = found["replicas"]
        if self.load.settings.get("models"):
            del self.load.settings["models"]
        self._autoscaled(found, found["replicas"], alone=True)

    def pools(self, found: Mapping, classes: Mapping) -> None:
        rng = self.rng
        names = ["a", "b", "c"][: rng.choice([1, 2, 2, 3])]
        several = not self.load.closed and rng.random() < 0.6
        hosted: list[str] = []
        pools: Mapping = {}
        model = rng.choices(_MODELS, _WEIGHTS)[0]
        for name in names:
            if several and rng.random() < 0.3:
                shared = [*_DENSE, f"{_DENSE[0]}#two"][: rng.choice([2, 3])]
                pool = self._machine(_MODELS[0], classes, shared=True)
                del pool["model"]
                pool["models"] = shared
                own = Random(str(pool))
                if own.random() < 0.4:
                    drafts = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"alpha": 0.5}}
                    pool["decoding_by_model"] = {own.choice(shared): drafts}
                hosted += shared
            else:
                which = rng.choices(_MODELS, _WEIGHTS)[0] if several else model
                pool = self._machine(which, classes)
                hosted.append(which.name)
            pool["replicas"] = rng.choice([1, 1, 2, 3])
            self.machines += pool["replicas"]
            self._autoscaled(pool, pool["replicas"], alone=len(names) == 1)
            pools[name] = pool
        self._asked(found, hosted)
        found["pools"] = self._spread(found, pools)

    def placement(self, found: Mapping, classes: Mapping) -> None:
        machine = self._machine(_MODELS[0], classes, shared=True)
        for key in ("model", "parallel", "micro_batches"):
            machine.pop(key, None)
        if isinstance(
            machine.get("hardware"), dict
        ):  # one of the groups is a pipeline, whose stages no table of steps has
            machine["hardware"] = machine["hardware"]["device"]
        found |= machine
        found["placement"] = "placement.json"
        self.machines = 2
        self._asked(found, list(_DENSE))

    def apart(self, found: Mapping, classes: Mapping) -> None:
        rng = self.rng
        model = rng.choices(_MODELS, _WEIGHTS)[0]
        kinds = [("p", "prefill"), ("d", "decode")]
        kinds += [("p2", "prefill")] if rng.random() < 0.2 else []
        kinds += [("d2", "decode")] if rng.random() < 0.2 else []
        kinds += [("both", "both")] if rng.random() < 0.15 else []
        pools: Mapping = {}
        kv_precision = rng.choice([None, None, None, "fp8"])
        same = model.hardware[0] if rng.random() < 0.6 else None
        for name, role in kinds:
            pool = self._machine(model, classes, hardware=same)
            pool |= {"role": role, "replicas": rng.choice([1, 1, 2, 3])}
            pool.pop("kv_precision", None)
            pool.pop("precision", None)
            if kv_precision:
                pool["kv_precision"] = kv_precision
            self.machines += pool["replicas"]
            self._autoscaled(pool, pool["replicas"], alone=False)
            pools[name] = pool
        room = rng.choice(["after_prefill", "before_prefill"])
        links: Mapping = {}
        for sender in [name for name, role in kinds if role == "prefill"]:
            for receiver in [name for name, role in kinds if role == "decode"]:
                links[f"{sender}-{receiver}"] = {"sender": sender, "receiver": receiver, **self._link(room)}
        found["pools"] = self._spread(found, pools)
        found["links"] = links
        handover: Mapping = {"room": room, "router": self._router(asked="handover")}
        handover |= _some(
            rng, 0.4, like=["vllm", "sglang", "trtllm", "dynamo", "splitwise"], first_token=["prefill", "arrival", "decode"],
            local_prefill_tokens=[0, 40, 200], headroom_tokens=[0, 16, 100], repack=[True, False],
        )  # fmt: skip
        if rng.random() < 0.3:
            del handover["router"]
        found["handover"] = handover
        self.load.settings.pop("models", None)

    def _asked(self, found: Mapping, hosted: list[str]) -> None:
        """Requests ask for the models that there are."""
        names = list(dict.fromkeys(hosted))
        if len(names) > 1:
            self.load.settings["models"] = {name: self.rng.choice([1, 2, 0.5]) for name in names}
        else:
            self.load.settings.pop("models", None)

    def _spread(self, found: Mapping, pools: Mapping) -> Mapping:
        """The same pools, what all of them say in the same words sometimes said at the top."""
        first = next(iter(pools.values()))
        for key in ("hardware", "scheduler", "memory", "experts"):
            if key in first and all(pool.get(key) == first[key] for pool in pools.values()):
                found[key] = first[key]
                for pool in pools.values():
                    del pool[key]
        return pools

    def _link(self, room: str) -> Mapping:
        rng = self.rng
        found = _some(
            rng, 0.4, connector=["mooncake_vllm", "mooncake_sglang"], bandwidth_gb_per_s=[0.05, 0.5, 5, 50],
            latency_s=[0.0, 0.0005, 0.02], concurrent_transfers=[1, 2, 5],
        )  # fmt: skip
        found["shared"] = rng.choice(["sender", "receiver", "pair", "pools"])
        if room == "before_prefill" and rng.random() < 0.5:
            found["sent"] = "layers"
        if rng.random() < 0.3:
            found["degraded"] = self._degraded()
        return found

    def _degraded(self) -> list[Mapping]:
        rng = self.rng
        first = rng.choice([
            {"at_s": 0.2, "for_s": 0.3, "factor": 0.0},
            {"at_s": 0.1, "for_s": 0.5, "factor": 0.1},
            {"at_s": 0.0, "for_s": 0.6, "added_latency_s": 0.01},
        ])  # fmt: skip
        return [first, {"at_s": 0.8, "factor": 0.5, "added_latency_s": 0.002}][: rng.choice([1, 2])]

    # A machine.

    def _machine(
        self, model: _Model, classes: Mapping, *, shared: bool = False, hardware: str | None = None
    ) -> Mapping:
        rng = self.rng
        devices = [name for name in model.hardware if self.stack != "trtllm" or name not in ("mi300x", "tpu-v5e")]
        found: Mapping = {"model": model.name, "hardware": hardware or rng.choice(devices)}
        parallel: Mapping = {}
        ranks = 1
        if model.ranks and not shared and rng.random() < 0.5:
            ranks = rng.choice(model.ranks)
            parallel = {"data": ranks, "expert": ranks}
            self.ranks = True
        else:
            parallel = {"tensor": rng.choice(model.tensor)}
            if not shared:
                parallel["pipeline"] = rng.choice(model.pipeline)
            if model.ranks and rng.random() < 0.3:
                parallel["expert"] = parallel["tensor"]
        found["parallel"] = parallel
        pipelined = parallel.get("pipeline", 1) > 1
        if ranks == 1 and not shared and rng.random() < (0.4 if pipelined else 0.05):
            found["micro_batches"] = rng.choice([1, 2, 3, 5])
        if ranks > 1:
            # Draws of their own leave all others as they are.
            turns = Random(str(rng.getstate()))
            parallel["pipeline"] = turns.choice([1, 1, 1, 2])
            if turns.random() < (0.4 if parallel["pipeline"] > 1 else 0.1):
                found["micro_batches"] = turns.choice([1, 2, 3])
            pipelined = parallel["pipeline"] > 1
        pipelined = pipelined or found.get("micro_batches", 1) > 1
        if ranks > 1:
            if rng.random() < 0.5:
                found["rank_router"] = self._router(asked="ranks")
            if rng.random() < 0.3:
                found["prompt_balance"] = {
                    "timeout_iters": rng.choice([1, 5, 50]),
                    "batching_wait_iters": rng.choice([0, 3]),
                }
        if model.ranks and rng.random() < 0.4:
            found["experts"] = self._experts(model, ranks, parallel.get("expert", 1))
        if rng.random() < 0.1 and not model.ranks and not found["hardware"].startswith(("v100", "tpu", "a1")):
            found["precision"] = rng.choice(["fp8", "int4"])
        if rng.random() < 0.1 and not found["hardware"].startswith("v100"):
            found["kv_precision"] = "fp8"
        if rng.random() < 0.1 and not self.roofline:
            found["power_limit_w"] = round(rng.uniform(0.4, 1.0) * load_device(found["hardware"]).tdp_w)
        graphs = (
            not self.roofline and self.stack in ("vllm", "sglang", "trtllm") and not found["hardware"].startswith("tpu")
        )
        if graphs and rng.random() < 0.15:
            found["cuda_graphs"] = rng.choice(
                [{"largest": 16}, {"sizes": [1, 4, 16, 64]}, {"eager": True}, {"decode_only": True}]
            )
        memory = self._memory(shared)
        found["memory"] = memory
        decodes = not shared and rng.random() < 0.3
        if decodes:
            found["decoding"] = self._decoding(model, ranks, parallel)
        found["scheduler"] = self._scheduler(
            classes, memory, pipelined or shared, bool(decodes), found.get("decoding", {})
        )
        self._prompts_of_sglang(found, ranks, pipelined or shared)
        own = Random(str(rng.getstate()))
        fixed = self.roofline or decodes or pipelined or {"experts", "cuda_graphs", "power_limit_w"} & set(found)
        if not fixed and found["hardware"] not in ("cpu", "trainium2") and own.random() < 0.15:
            found["hardware"] = {"steps": "steps.csv", "device": found["hardware"], "where": {"backend": "a"}}
            found["hardware"] |= _some(own, 0.3, host_s=[0.0, 1e-3])
        return found

    def _experts(self, model: _Model, ranks: int, groups: int) -> Mapping:
        rng = self.rng
        popularity = ["measured", "even", {"zipf": 0.8, "seed": 3}]
        popularity += ["popularity.txt"] if model.name == "qwen3-30b-a3b" else []
        found: Mapping = {"popularity": rng.choice(popularity)}
        if groups > 1 and found["popularity"] != "measured":
            found["placement"] = rng.choice(["linear", "round_robin", "eplb"])
        if found.get("placement") == "eplb":
            found["redundant"] = rng.choice([0, groups])
        if ranks > 1 and rng.random() < 0.5:
            found["exchange"] = rng.choice(
                ["allgather_reducescatter", "all_to_all", "deepep_high_throughput", "deepep_low_latency"]
            )
        return found

    def _memory(self, shared: bool) -> Mapping:
        rng, load = self.rng, self.load
        found: Mapping = {}
        block = rng.choice([1, 16, 16, 16, 32, 64])
        if rng.random() < 0.5:
            found["block_tokens"] = block
        else:
            block = {"vllm": 16, "sglang": 1, "trtllm": 32}.get(self.stack, 16)
        if rng.random() < 0.75:
            tokens = load.longest * rng.choice([0.7, 1.2, 1.6, 2.5, 4, 10])
            found["kv_blocks"] = int(tokens) // block + 3
        else:
            share = {"sglang": "mem_fraction_static", "trtllm": "free_gpu_memory_fraction"}
            name = "gpu_memory_utilization" if self.roofline else share.get(self.stack, "gpu_memory_utilization")
            found |= _some(rng, 0.2, **{name: [0.88, 0.95]}, reserve_bytes=[1e9])
            if self.stack == "vllm" and not self.roofline:
                found |= _some(rng, 0.1, release=["0.19", "0.11"])
        caches = rng.random() < 0.7
        if rng.random() < 0.4:
            found["prefix_caching"] = caches
        elif self.stack in ("eager", "ideal"):
            caches = False
        else:
            caches = True
        draws = 0.45 if load.ids else 0.08
        if not shared and rng.random() < draws and (caches or rng.random() < 0.5):
            found["tiers"] = self._tiers()
            if not caches:
                found["preemption"] = "swap"
                found["tiers"] = [tier for tier in found["tiers"] if tier["kind"] != "peer"]
            elif all(tier["kind"] != "peer" for tier in found["tiers"]) and rng.random() < 0.3:
                found["preemption"] = "swap"
            if found.get("preemption") == "swap" and found["tiers"][0]["kind"] != "host":
                found["tiers"].insert(0, {"kind": "host", "gib": 0.5, "read_gb_per_s": 20})
        # Numbers of its own: whatever else is drawn stays.
        own = Random(str(found))
        if caches and found.get("prefix_caching") and own.random() < 0.5:
            name = own.choice(["lru", "mru", "lfu", "fifo", "filo", "slru", "retention", "belady"])
            of_slru = {"protected_from": own.choice([2, 3])}
            settings = {"tokens": own.choice([16, 64]), "priority": 80, "others": own.choice([35, 90])}
            settings |= own.choice([{}, {"duration_s": 2.0}])
            own_settings = {"retention": settings, "slru": of_slru}.get(name)
            found["eviction"] = name if own_settings is None else {"policy": name, **own_settings}
        return found

    def _tiers(self) -> list[Mapping]:
        rng = self.rng
        kinds = rng.choice([["host"]] * 4 + [["disk"], ["remote"], ["host", "disk"], ["host", "remote"], ["host", "peer"],
                           ["host", "disk", "remote", "peer"], ["disk", "remote"]])  # fmt: skip
        found = []
        for i, kind in enumerate(kinds):
            tier: Mapping = {"kind": kind}
            if kind != "peer":
                tier["gib"] = 2.0 if kind == "remote" else rng.choice([0.15, 0.3, 1, 8])
            tier["read_gb_per_s"] = rng.choice([0.2, 2, 30])
            if kind != "peer":
                tier |= _some(rng, 0.3, write_gb_per_s=[0.1, 10])
            tier |= _some(
                rng,
                0.3,
                latency_ms=[0, 0.3, 5],
                min_load_tokens=[0, 32, 200],
                skip_when_slower=[True],
                concurrent_transfers=[1, 3],
            )
            if kind in ("host", "disk") and "peer" not in kinds and i == kinds.index(kind) and rng.random() < 0.25:
                tier["write"] = "eviction"
            if kind != "host" and "host" in kinds and rng.random() < 0.4:
                tier["staged"] = True
            if kind == "remote" and rng.random() < 0.3:
                tier["store"] = "elsewhere"
            if rng.random() < 0.15:
                tier["degraded"] = self._degraded()
            own = Random(str(tier))
            if tier.get("write") != "eviction":
                if kind == "remote":
                    tier |= _some(own, 0.3, store_read_gb_per_s=[5.0], store_write_gb_per_s=[3.0])
                if kind != "host":
                    tier |= _some(own, 0.2, fabric=[{"name": "net", "gb_per_s": 4.0}])
            if kind in ("host", "disk"):
                tier |= _some(own, 0.4, eviction=["lfu", "fifo", "mru", {"policy": "retention", "tokens": 64}])
            found.append(tier)
        return found

    def _decoding(self, model: _Model, ranks: int, parallel: Mapping) -> Mapping:
        rng = self.rng
        method = rng.choice(["draft_model", "ngram", "medusa", "eagle", "mtp"])
        found: Mapping = {"method": method}
        if method in ("draft_model", "eagle") or (method == "mtp" and not (model.mtp and rng.random() < 0.6)):
            ways: list[Mapping] = [{"cost_ratio": 0.1}, {"step_s": 0.0003}]
            if model.name == "llama-3.1-8b":
                ways = [{"model": "llama-3.2-1b"}, {"model": "llama-3.2-1b", "tensor": 1}, *ways]
                ways += [{"model": "qwen3-0.6b", "allow_vocabulary_mismatch": True}]
            found["draft"] = rng.choice(ways)
        if rng.random() < 0.3:
            found["overhead_s"] = rng.choice([0.0001, 0.002])
        if method in ("medusa", "eagle") and rng.random() < 0.6:
            shapes: list[Mapping] = [{"nodes": 6}, {"branching": [2, 1]}, {"paths": [[0], [1], [0, 0]]}]
            found["acceptance"] = {"tree": {"accuracies": [[0.6, 0.2], [0.5, 0.1]], **rng.choice(shapes)}}
            return found
        k = rng.choice([1, 2, 3])
        kinds: list[Mapping] = [
            {"alpha": rng.choice([0.0, 0.5, 0.8, 1.0])},
            {"per_position": [0.8, 0.5, 0.4], "kind": rng.choice(["conditional", "unconditional"])},
            {"mean_length": 1 + 0.6 * k, "at_k": k},
            {"lengths": [1 + 0.6 * (i + 1) for i in range(k)]},
            {"beta": {"mean": 0.7, "sd": 0.15}},
            {"two_state": {"alpha_good": 0.9, "alpha_bad": 0.2, "stay_good": 0.8, "stay_bad": 0.5}},
            {"two_state": {"alpha_good": 0.95, "alpha_bad": 0.05, "lag1": 0.2, **_some(rng, 0.5, good_share=[0.7])}},
            {"recorded": "accepted.csv", "recorded_k": 3},
            {"distributions": {"target": [0.5, 0.3, 0.2], "draft": [0.6, 0.3, 0.1]}},
        ]
        if model.mtp and method == "mtp" and k == 1:
            kinds = [{"published": "deepseek-v3"}]
        found["acceptance"] = rng.choice(kinds)
        if "distributions" in found["acceptance"]:
            found |= rng.choice([{}, {"rule": "naive_match"}, {"rule": "lenient", "b": 0.8}])
        found["num_speculative_tokens"] = k
        if rng.random() < 0.25 and "published" not in found["acceptance"]:
            found["num_speculative_tokens"] = rng.choice([[[1, 4, k], [5, None, 1]], [[1, 2, k], [3, None, 0]]])
        if rng.random() < 0.15 and not {"recorded", "published", "mean_length"} & set(found["acceptance"]):
            found |= {"num_speculative_tokens": "adaptive", "max_speculative_tokens": 3}
        return found

    # Policies.

    def _scheduler(self, classes: Mapping, memory: Mapping, no_overlap: bool, drafts: bool, decoding: Mapping) -> Any:
        rng = self.rng
        own = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm"}.get(self.stack, "sarathi")
        name = own if rng.random() < 0.45 else rng.choice(
            ["vllm", "vllm-v0", "sglang", "trtllm", "sarathi", "orca", "orca_paged", "static", "fastertransformer",
             "decode_maximal", "chunked_only"]
        )  # fmt: skip
        asynchronous = not no_overlap and decoding.get("method", "mtp") in ("draft_model", "eagle", "mtp")
        settings = self._settings(name, memory, asynchronous, no_overlap)
        found: Any = {"policy": name, **settings}
        if rng.random() < 0.3:
            found = {"policy": name}
        gives_way = (
            name in ("vllm", "vllm-v0", "sglang") or settings.get("capacity_scheduler_policy") == "MAX_UTILIZATION"
        )
        if not gives_way and memory.get("preemption") is None and rng.random() < 0.1:
            found = {"policy": "evict_newest", "inner": found}
        while rng.random() < 0.3:
            found = self._wrapped(found, classes)
        return found["policy"] if set(found) == {"policy"} and rng.random() < 0.5 else found

    def _prompts_of_sglang(self, found: Mapping, ranks: int, no_overlap: bool) -> None:
        """Rules for the moments of prompts, by draws of their own."""
        own, policy = Random(f"prompts {self.rng.getstate()}"), found["scheduler"]
        while isinstance(policy, dict) and "inner" in policy:
            policy = policy["inner"]
        if not isinstance(policy, dict) or policy["policy"] != "sglang":
            return
        policy |= _some(own, 0.3, prefill_decode_interval=[1, 5])
        if ranks == 1 or no_overlap or "prompt_balance" in found or policy.get("disable_overlap_schedule"):
            policy |= _some(own, 0.2, prefill_decode_interval_min_bs=[2])
        elif own.random() < 0.7:
            policy |= {"enable_prefill_delayer": True} | _some(
                own, 0.4, prefill_delayer_max_delay_passes=[1, 4], prefill_delayer_token_usage_low_watermark=[0.05, 0.9],
                prefill_delayer_queue_min_ratio=[0.5], prefill_delayer_max_delay_ms=[5.0, 500.0],
            )  # fmt: skip

    def _settings(self, name: str, memory: Mapping, asynchronous: bool, no_overlap: bool) -> Mapping:
        rng = self.rng
        some = rng.choice([1, 3, 8, 30])
        if name == "vllm":
            found: Mapping = {"max_num_seqs": some, "max_num_batched_tokens": rng.choice([64, 200, 2048])}
            found |= _some(
                rng, 0.2, long_prefill_token_threshold=[16, 100], long_prefill_token_threshold_adaptive=[True],
                prefill_schedule_interval=[2, 4],
                scheduling_policy=["priority"], watermark=[0.05], max_num_active_seqs=[min(some, 2)], max_num_scheduled_tokens=[64],
            )  # fmt: skip
            if rng.random() < 0.1:
                found |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 40_000}
                found.pop("max_num_scheduled_tokens", None)
            if rng.random() < 0.3 and "scheduling_policy" not in found:
                found["scheduler_reserve_full_isl"] = False
            if rng.random() < 0.3:
                found["async_scheduling"] = asynchronous and rng.random() < 0.5
            return found
        if name == "vllm-v0":
            return {"max_num_seqs": some, "max_num_batched_tokens": rng.choice([512, 8192])}
        if name == "sglang":
            found = {"chunked_prefill_size": rng.choice([-1, 128, 512]), "max_running_requests": rng.choice([2, 8, 40])}
            mixes = found["chunked_prefill_size"] > 0
            found |= _some(
                rng, 0.25, schedule_policy=["fcfs", "lof"], schedule_conservativeness=[0.3, 1.0], enable_mixed_chunk=[mixes],
                scheduler_recv_interval=[3], disable_overlap_schedule=[True], ignore_eos=[True], max_prefill_tokens=[256],
                prefill_max_requests=[2],
            )  # fmt: skip
            if memory.get("prefix_caching") is not True and "tiers" not in memory:
                found |= _some(rng, 0.1, disable_radix_cache=[True])
            return found
        if name == "trtllm":
            found = {"max_batch_size": some, "max_num_tokens": 8192}
            found["capacity_scheduler_policy"] = rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"])
            if rng.random() < 0.5:
                found |= {"enable_chunked_prefill": True, "max_num_tokens": rng.choice([128, 512])}
                found["context_chunking_policy"] = rng.choice(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"])
            if rng.random() < 0.3:
                found |= {
                    "batch_wait_timeout_iters": 3,
                    "batch_wait_max_tokens_ratio": 0.5,
                    "count_cached_tokens": False,
                }
            if no_overlap or rng.random() < 0.3:
                found["disable_overlap_scheduler"] = True
            return found | _some(
                rng, 0.15, enable_prefix_aware_scheduling=[False], chunk_unit_size=[1, 64], use_kv_cache_manager_v2=[True],
                max_util_for_resume=[0.5, 0.95],
            )  # fmt: skip
        if name == "sarathi":
            return {"token_budget": rng.choice([32, 128, 512]), "max_sequences": some}
        if name == "chunked_only":
            return {"token_budget": rng.choice([64, 512]), "max_sequences": some}
        if name == "decode_maximal":
            found = {"chunk": rng.choice([64, 256]), "max_sequences": rng.choice([2, 8, 18])}
            return found | _some(rng, 0.3, align=[False], chunk_when_full=[True])
        if name in ("static", "fastertransformer"):
            return {"batch_size": rng.choice([1, 3, 8])}
        if name == "orca_paged":
            return {"max_sequences": some, "max_prompts": rng.choice([None, 1])}
        return {"max_sequences": some, **_some(rng, 0.3, n_slots=[4000])}

    def _wrapped(self, inner: Any, classes: Mapping) -> Mapping:
        rng, columns = self.rng, self.load.columns
        limits = any(each.get("slo", {}).get("ttft_s") for each in classes.values())
        names = ["order", "order", "cap", "reject", "preempt", "pad"]
        names += ["weighted_fair"] * 2 if classes or "tenant" in columns else []
        names += ["keep_slo"] * 2 if limits else []
        name = rng.choice(names)
        found: Mapping = {"policy": name, "inner": inner}
        if name == "order":
            by = ["arrival", "priority", "deadline", "shortest_prompt"]
            by += ["first_token"] if limits else []
            by += ["shortest_predicted"] if "predicted_tokens" in columns or "predictor" in self.load.settings else []
            found["by"] = rng.choice(by)
        elif name == "cap":
            found |= rng.choice([{"max_sequences": 4}, {"max_tokens": 3000}, {"max_prompts": 1}])
        elif name == "weighted_fair":
            found |= _some(rng, 0.3, prompt_weight=[2], output_weight=[1])
        elif name == "pad":
            found["sequences"] = 64
        elif name == "keep_slo":
            found |= rng.choice([{}, {"otherwise": "demote"}, {"otherwise": "shorten", "max_tokens": 8}])
        return found

    def _router(self, asked: str) -> Any:
        rng = self.rng
        plain = ["round_robin", "random", "least_outstanding", "power_of_two", "least_kv", "least_queue", "least_kv_use",
                 "vllm_ranks", "trtllm_ranks"]  # fmt: skip
        name = rng.choice(
            [*plain, "prefix"] if asked == "ranks" else plain + ["session", "prefix", "llm_d", "dynamo"] * 2
        )
        found: Mapping = {"policy": name}
        if asked == "ranks":
            return name
        if name in ("prefix", "llm_d", "dynamo"):
            if rng.random() < 0.4:
                found["index"] = "approximate"
                if rng.random() < 0.5:
                    found |= {"block_tokens": rng.choice([16, 64]), "capacity_blocks": rng.choice([20, 1000])}
                if rng.random() < 0.4:
                    found |= rng.choice([{"max_age_s": 0.3}, {"max_blocks": 4}])
            elif rng.random() < 0.4:
                found["event_delay_s"] = rng.choice([0.001, 0.1])
            if rng.random() < 0.4:
                found["poll_s"] = rng.choice([0.005, 0.1])
            if name == "dynamo" and rng.random() < 0.4:
                found |= {"temperature": 0.5, "overlap_weight": 2}
            if name == "llm_d":
                found |= _some(rng, 0.3, queue=[1.0], kv=[0.0], prefix=[5.0], session=[1.5], no_hit_lru=[0.0])
        elif name == "vllm_ranks":
            found |= _some(rng, 0.3, waiting_weight=[1.0])
        elif name == "session" and rng.random() < 0.5:
            found |= {"inner": rng.choice(plain), "max_waiting": rng.choice([0, 3])}
        if rng.random() < 0.1:
            found = {"policy": "reserve", "machines": 1, "inner": found}
        elif rng.random() < 0.1 and asked == "top":
            found = {
                "policy": "shed",
                "inner": found,
                **_some(rng, 0.6, max_waiting=[2], max_kv_use=[0.3], priority=[0]),
            }
        return found["policy"] if set(found) == {"policy"} and rng.random() < 0.5 else found

    def classes(self, found: Mapping) -> Mapping:
        """Classes of the scenario, put into *found*."""
        rng, load = self.rng, self.load
        if load.closed or rng.random() > (0.8 if "class" in load.columns else 0.3):
            return {}
        classes: Mapping = {}
        for name in _CLASSES if "class" in load.columns else ("gold", *_CLASSES)[: rng.choice([1, 2, 3])]:
            each: Mapping = {} if "class" in load.columns else {"share": rng.choice([1, 2, 5])}
            if rng.random() < 0.6 and "priority" not in load.columns:
                each["priority"] = rng.randrange(3)
            if rng.random() < 0.4:
                each["weight"] = rng.choice([0.5, 2.0])
            if rng.random() < 0.4 and "tenant" not in load.columns:
                each["tenant"] = rng.choice(["shop", "lab"])
            if rng.random() < 0.3 and "deadline_s" not in load.columns:
                each["deadline_s"] = rng.choice([0.2, 1.5])
            if rng.random() < 0.6:
                each["slo"] = rng.choice([{"ttft_s": 0.05}, {"ttft_s": 0.5, "e2el_s": 1.0}, {"tpot_s": 0.01}])
            classes[name] = each
        found["classes"] = classes
        return classes

    # Machines in time.

    def _autoscaled(self, found: Mapping, replicas: int, *, alone: bool) -> None:
        rng, load = self.rng, self.load
        if rng.random() > 0.2:
            return
        least = rng.choice([0, 1, 1]) if replicas > 1 or rng.random() < 0.3 else 1
        most = max(replicas, rng.choice([1, 2, 4]))
        policies: list[Mapping] = [
            {"policy": "target_tracking", "target": rng.choice([2, 8]), "measure": "concurrency"},
            {"policy": "target_tracking", "target": 0.5, "measure": "kv_use", "tolerance": 0.3},
            {"policy": "target_tracking", "target": 2, "measure": rng.choice(["waiting", "running"])},
            {
                "policy": "target_tracking",
                "target": 20,
                "measure": rng.choice(["requests_per_s", "output_tokens_per_s"]),
            },
            {"policy": "concurrency", "target": 4, **_some(rng, 0.5, tolerance=[0.0])},
            {
                "policy": "knative",
                "target": 4,
                "stable_s": 1.0,
                "panic_s": 0.2,
                "grace_s": 1.0,
                "utilization": 0.8,
                **_some(rng, 0.5, panic_at=[1.2]),
            },
            {
                "policy": "rate_model",
                "rate_per_s": 10,
                "ttft_s": 0.2,
                "remembers_s": 0.5,
                **_some(rng, 0.5, share=[0.6]),
            },
            {
                "policy": rng.choice(["last_value", "kalman", "seasonal_naive", "holt_winters"]),
                "rate_per_s": 10,
                "step_s": 20.0,  # a multiple of every interval
                "before": [0.0, 30.0, 10.0],
                **_some(
                    rng, 0.5, horizon_s=[0.5, 60.0], headroom=[0.2], inner=[{"policy": "concurrency", "target": 4}]
                ),
            },
            {"policy": "schedule", "at_s": [0, 0.5, 1.2], "machines": [max(least, 1), most, max(least, 1)]},
            {"policy": "schedule", "at_s": [0, 0.4], "machines": [most, max(least, 1)], "every_s": 0.9},
        ]
        if alone and load.arrives and not load.closed:
            policies += [{"policy": "perfect", "rate_per_s": 15, "step_s": 0.3}] * 2
        policy = rng.choice(policies)
        policy = {**policy, **_forecast_settings(Random(f"{policy} of {found}"), str(policy["policy"]))}
        autoscale: Mapping = {"policy": policy, "min": least, "max": most}
        autoscale["interval_s"] = rng.choice([0.05, 0.2, 1.0]) * (20 if load.slow else 1)
        if rng.random() < 0.6:
            autoscale["start"] = rng.choice([{"image": 0.1, "weights": 0.4}, {"boot": 0.02}, "qwen3-32b-h100-restore"])
        autoscale |= _some(rng, 0.4, provision_s=[0.05], down_window_s=[0, 0.3], up_window_s=[0.1], drain_s=[0.0, 0.05])
        found["autoscale"] = autoscale
        self.machines += most - replicas

    def common(self, found: Mapping) -> None:
        """Settings of all machines together."""
        rng = self.rng
        if rng.random() < 0.75:
            found["router"] = self._router(asked="top")
        if rng.random() < 0.3:
            failures: Mapping = {}
            if rng.random() < 0.6:
                failures |= {"mean_up_s": rng.choice([0.3, 1.0, 5.0]), "mean_down_s": rng.choice([0.02, 0.3])}
                if rng.random() < 0.3:
                    failures["shape"] = rng.choice([0.7, 2.0])
            if rng.random() < 0.5:
                failures["times"] = [
                    {
                        "machine": rng.randrange(self.machines),
                        "at_s": rng.choice([0.05, 0.3, 1.0]),
                        "for_s": rng.choice([0.0, 0.2]),
                    }
                    for _ in range(rng.choice([1, 2]))
                ]
                if rng.random() < 0.3:
                    del failures["times"][0]["for_s"]
            if rng.random() < 0.3:
                failures["slow"] = [{"machine": rng.randrange(self.machines), "factor": rng.choice([1.0, 1.5, 4.0])}]
            failures["in_flight"] = rng.choice(["resume", "retry", "lose"])
            failures |= _some(rng, 0.4, retries=[0, 1, None], when_none=["lose"])
            found["failures"] = failures
        if rng.random() < 0.5:
            found["slo"] = rng.choice([{"ttft_s": 0.1}, {"ttft_s": 0.5, "tpot_s": 0.01}, {"e2el_s": 0.7}])
        if rng.random() < 0.3:
            listed = [{"provider": "coreweave"}, {"prices": "prices.toml", "provider": "ours"}]
            found["costs"] = rng.choice([{"usd_per_device_hour": 2.5}, {"pue": 1.3, "carbon_g_per_kwh": 250}, *listed])
        if rng.random() < 0.25:
            found["window"] = rng.choice([{"from_s": 0.1}, {"from_s": 0, "to_s": 0.4}, {"to_s": 0.2}, "after_warmup"])


# Workloads.


def _a_load(rng: Random) -> _Load:
    kind = rng.choice(
        ["generated"] * 7 + ["closed"] * 3 + ["trace"] * 7 + ["shared_prefix"] * 4 + ["conversations"] * 3
        + ["sessions"] * 2 + ["mooncake"] * 2 + ["rollout"] * 2 + ["servegen", "protocol", "conversation", "export"]
    )  # fmt: skip
    load = _LOADS[kind](rng)
    settings = load.settings
    open_ = not load.closed
    if open_ and kind not in ("shared_prefix", "servegen") and rng.random() < 0.2:
        settings["rate_scale"] = rng.choice([0.5, 3.0])
    if rng.random() < 0.15 and kind in ("generated", "trace", "mooncake", "shared_prefix"):
        settings["limit"] = rng.choice([1, 20, 50])
    if open_ and "predicted_tokens" not in load.columns and rng.random() < 0.15:
        settings["predictor"] = {"error": rng.choice([0.0, 0.7])}
    if "max_tokens" not in load.columns and kind != "conversation" and rng.random() < 0.15:
        settings["max_tokens"] = 2 * _LONGEST
    return load


def _a_process(rng: Random) -> Mapping:
    rate = rng.choice([5, 20, 60, 300])
    return rng.choice([
        {"process": "poisson", "rate_per_s": rate},
        {"process": "gamma", "rate_per_s": rate, "cv": rng.choice([0.5, 3])},
        {"process": "deterministic", "rate_per_s": rate},
        {"process": "pareto", "rate_per_s": rate, "tail": 1.8},
        {"process": "mmpp", "rates_per_s": [5, 100], "mean_state_s": [0.4, 0.2]},
        {"process": "piecewise", "rates_per_s": [40, 0, 90], "window_s": 0.4},
        {"process": "piecewise", "file": "rates.csv"},
        {"process": "sinusoidal", "rate_per_s": 40, "amplitude": 0.9, "period_s": 1.5, "peak_s": 0.4, "burst_factor": 3,
         "burst_every_s": 0.5, "burst_s": 0.05},
    ])  # fmt: skip


def _lengths(rng: Random, most: int) -> Any:
    low = max(1, most // 10)
    return rng.choice([
        most // 2,
        {"distribution": "fixed", "tokens": most // 3},
        {"distribution": "uniform", "min_tokens": low, "max_tokens": most},
        {"distribution": "lognormal", "mean": 0.5 * most, "median": 0.3 * most, "max_tokens": most},
        {"distribution": "lognormal", "mu": 3.0, "sigma": 0.6, "max_tokens": most},
        {"distribution": "zipf", "theta": 0.5, "min_tokens": low, "max_tokens": most},
        {"distribution": "empirical", "tokens": [low, most // 2, most]},
        {"distribution": "empirical", "probabilities": [0.0, 0.6, 1.0], "tokens": [low, most // 3, most], "stratified": True},
    ])  # fmt: skip


def _generated(rng: Random) -> _Load:
    most = rng.choice([60, 300, 1500])
    found: Mapping = {
        "arrivals": _a_process(rng),
        "prompt_tokens": _lengths(rng, most),
        "output_tokens": _lengths(rng, _LONGEST),
    }
    if rng.random() < 0.1:
        found["output_tokens"] = rng.choice([0, 1])
    if rng.random() < 0.8:
        found["requests"] = rng.choice([5, 20, 40, 80])
    else:
        found["duration_s"] = 1.1
    return _Load(found, longest=most + _LONGEST)


def _closed(rng: Random) -> _Load:
    arrivals: Mapping = {"process": "closed_loop", "concurrency": rng.choice([1, 4, 16])}
    if rng.random() < 0.5:
        arrivals["mean_think_s"] = 0.05
    if rng.random() < 0.3:
        return _Load(
            {"trace": "trace-0.csv", "arrivals": arrivals, "requests": 40}, closed=True, arrives=False, longest=430
        )
    most = rng.choice([60, 300])
    found = {
        "arrivals": arrivals,
        "prompt_tokens": _lengths(rng, most),
        "output_tokens": _lengths(rng, _LONGEST),
        "requests": 50,
    }
    return _Load(found, closed=True, arrives=False, longest=most + _LONGEST)


def _trace(rng: Random) -> _Load:
    number = rng.randrange(TRACES)
    columns = frozenset(name for name, there in _columns(number).items() if there)
    found: Mapping = {"trace": f"trace-{number}.csv"}
    if rng.random() < 0.25:
        found |= {"arrivals": _a_process(rng), "requests": rng.choice([10, 60])}
    found |= _some(rng, 0.1, format=["plain"], sort=[True], drop_empty=[True])
    return _Load(found, ids="prefix_blocks_16" in columns, columns=columns, longest=430)


def _shared(rng: Random) -> _Load:
    stages = [{"rate_per_s": rng.choice([10, 60]), "duration_s": 0.6} for _ in range(rng.choice([1, 2, 3]))]
    system = rng.choice([100, 400, 900])
    found = {
        "groups": rng.choice([1, 3, 6]), "prompts_per_group": rng.choice([1, 4]), "system_prompt_tokens": system,
        "question_tokens": rng.choice([1, 40]), "output_tokens": rng.choice([1, 20]), "stages": stages,
        "pause_s": rng.choice([0.0, 0.2]), "arrival": rng.choice(["poisson", "constant"]),
        "shuffle": system != 900,
    }  # fmt: skip
    limit = _some(rng, 0.3, in_flight=[1, 5, 200])
    return _Load(
        {"shared_prefix": found | limit},
        closed=bool(limit),
        arrives=len(stages) == 1 and not limit,
        ids=True,
        longest=system + 70,
    )


def _rollout(rng: Random) -> _Load:
    prompts, most = rng.choice([1, 4, 10]), rng.choice([60, 300])
    found: Mapping = {"prompts": prompts, "samples": rng.choice([1, 3]), "steps": rng.choice([1, 2, 3])}
    found |= _some(rng, 0.5, update_s=[0.0, 0.2], wanted=[max(1, prompts // 2)], block_tokens=[16, 64])
    found |= rng.choice([{}, {"informative": 0.6}, {"leftover": "continue"}, {"leftover": "abort"}])
    lengths = {"prompt_tokens": _lengths(rng, most), "output_tokens": _lengths(rng, _LONGEST)}
    return _Load({"rollout": found, **lengths}, closed=True, arrives=False, ids=True, longest=most + _LONGEST)


def _conversations(rng: Random) -> _Load:
    found = {
        "sessions": rng.choice([3, 12]), "turns": {"distribution": "uniform", "min_tokens": 1, "max_tokens": 5},
        "user_tokens": _lengths(rng, 120), "answer_tokens": _lengths(rng, _LONGEST),
        "system_prompt_tokens": rng.choice([0, 300]), "mean_think_s": rng.choice([0.0, 0.3]),
    }  # fmt: skip
    arrivals = {"process": "poisson", "rate_per_s": rng.choice([5, 50])}
    return _Load({"conversations": found, "arrivals": arrivals}, arrives=False, ids=True, longest=1000)


def _recorded(rng: Random) -> _Load:
    found = {"sessions": "sessions.jsonl", "arrivals": {"process": "poisson", "rate_per_s": rng.choice([5, 50])}}
    return _Load(found, arrives=False, ids=True, longest=1200)


def _hashed(rng: Random) -> _Load:
    if rng.random() < 0.5:
        found = {"trace": "rag_components.jsonl", **_some(rng, 0.5, component_order=["seen"])}
        return _Load(found, ids=True, longest=1100)
    return _Load({"trace": "mooncake.jsonl"}, ids=True, longest=2300)


def _production(rng: Random) -> _Load:
    found = {"arrivals": "arrivals.parquet", "lengths": "lengths.parquet", "model": "m", "duration_s": 600.0}
    found |= _some(rng, 0.3, clients=[[1]], start_s=[100.0], leave_out_without_lengths=[True])
    return _Load({"servegen": found}, longest=340, slow=True)


def _protocol(rng: Random) -> _Load:
    # Warm-up, where it is apart, is answered before the clock starts: all the same a closed loop.
    given = rng.choice(["inferencex", "genai-perf", {"like": "inferencex", "requests_per_client": 3, "think_s": 0.02}])
    found = {"protocol": given, "concurrency": rng.choice([1, 6]), "prompt_tokens": 200, "output_tokens": 30}
    return _Load(found, closed=True, arrives=False, longest=240)


def _export(rng: Random) -> _Load:
    columns = {"arrival": "at", "prompt_tokens": "usage.in", "output_tokens": "usage.out", "max_tokens": "limit"}
    found = {"trace": "export.jsonl", "columns": columns, "missing_output": rng.choice(["drop", "max_tokens", "draw"])}
    if rng.random() < 0.2:
        return _Load({"trace": "tenths.csv", "spread_arrivals": True}, longest=360)
    return _Load(
        found | _some(rng, 0.3, keep_failed=[True], since=[0.1, "2026-09-21T14:13:20.2Z"], until=[0.7]),
        columns=frozenset({"max_tokens"}),
        longest=470,
    )


def _builtin(rng: Random) -> _Load:
    if rng.random() < 0.5:
        own = {"policy": "workloads:azure_conversation_like", "n_requests": 25}
        return _Load({"generator": own, "rate_scale": 20}, longest=5000)
    return _Load({"trace": "conversation", "requests": 25, "rate_scale": 20}, longest=5000)


_LOADS = {
    "generated": _generated, "closed": _closed, "trace": _trace, "shared_prefix": _shared, "rollout": _rollout,
    "conversations": _conversations, "sessions": _recorded, "mooncake": _hashed, "servegen": _production, "protocol":
    _protocol, "conversation": _builtin, "export": _export,
}  # fmt: skip
