"""Devices that share sequences, counted here token by token and byte by byte."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.cost import CostModel
from hwmodels.deployment import Deployment, deploy
from hwmodels.device import load_device
from hwmodels.memory import LargestBatch, memory_plan, stack_memory
from hwmodels.model import load_model
from hwmodels.operations import SharedKv
from hwmodels.overheads import serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from hwmodels.work import stage_work

GQA, MLA = "qwen3-235b-a22b", "deepseek-v3"


@cache
def deployed(model: str, priced: bool = True, **degrees: int) -> Deployment:
    cost = Calibrated(stack=serving_stack("vllm")) if priced else Roofline
    return deploy(model=model, hardware="h200", parallel={"tensor": 8, "expert": 8, **degrees}, cost=cost)


def decodes(n: int, kv: int) -> Totals:
    return Totals(n, 0, 0, 0, 0, n, kv, n, 0, 0)


def prompt(tokens: int, past: int = 0) -> Totals:
    pairs = tokens * past + tokens * (tokens + 1) // 2
    return Totals(tokens, tokens, 1, pairs, past + tokens, 0, 0, 1, 0, 0)


@pytest.mark.parametrize(("n", "interleave"), [(2, 1), (4, 1), (8, 16), (3, 4)])
def test_the_fullest_device_has_as_many_tokens_as_when_each_is_put_down(n: int, interleave: int) -> None:
    rng = random.Random(n)
    lengths = [rng.randrange(1, 4_000) for _ in range(3_000)]
    # Token i lies on device i // interleave modulo n, so that the first has most.
    fullest = sum(sum(1 for i in range(length) if i // interleave % n == 0) for length in lengths[:300])
    fullest += sum(
        length // (n * interleave) * interleave + min(length % (n * interleave), interleave) for length in lengths[300:]
    )
    found = SharedKv(n=n, interleave=interleave).tokens(len(lengths), sum(lengths))
    assert found == pytest.approx(fullest, rel=2e-3)


def sent(model: str, **degrees: int) -> dict[str, tuple[str, float, int, int]]:
    work = stage_work(load_model(model), ParallelConfig(tensor=8, expert=8, **degrees), 0)
    found = (*work.collectives, *(() if work.shared_kv is None else work.shared_kv.of_decodes))
    return {each.name: (each.kind, each.bytes_per_row, each.n, each.layers) for each in found if "context" in each.name}


def test_what_devices_send_each_other_of_a_token() -> None:
    # 64 heads on 8 devices: the 16 of two devices with 128 numbers of two bytes, and a sum of four bytes of each from each.
    assert sent(GQA, decode_context=2) == {
        "context_queries": ("all_gather", 16 * 128 * 2, 2, 94),
        "context_sums": ("all_gather", 2 * 16 * 4, 2, 94),
        "context_outputs": ("reduce_scatter", 16 * 128 * 2, 2, 94),
    }
    # 128 heads on 8 devices; queries on the latent of 512 numbers and 64 rotated ones, results of 512.
    assert sent(MLA, decode_context=4) == {
        "context_queries": ("all_gather", 64 * 576 * 2, 4, 61),
        "context_sums": ("all_gather", 4 * 64 * 4, 4, 61),
        "context_outputs": ("reduce_scatter", 64 * 512 * 2, 4, 61),
    }
    # Two groups cache a key and a value of one head of each other's tokens; or a latent.
    assert sent(GQA, prefill_context=2) == {"context_kv": ("all_gather", 2 * 2 * 128 * 2, 2, 94)}
    assert sent(MLA, prefill_context=2) == {"context_kv": ("all_gather", 2 * 576 * 2, 2, 61)}
    assert sent(GQA) == sent(MLA) == {}


@pytest.mark.parametrize(("model", "n"), [(GQA, 2), (MLA, 2), (MLA, 8)])
def test_as_many_times_the_tokens_fit(model: str, n: int) -> None:
    def plan(**degrees: int) -> Any:
        return memory_plan(deployed(model, **degrees), stack_memory("vllm", None), largest=LargestBatch(8192, 256))

    alone, shared = plan(), plan(decode_context=n)
    assert (shared.rank_blocks, shared.block_tokens) == (alone.rank_blocks, n * alone.block_tokens)
    with pytest.raises(ValueError, match="kv_interleave 7 does not divide the 16 tokens"):
        plan(decode_context=n, kv_interleave=7)


def test_decodes_take_the_links_and_a_part_of_the_reading() -> None:
    """By the datasheet: the 94 layers each gather, gather and scatter, and attend with twice the heads to half the tokens."""
    n, kv = 16, 1_600_000
    alone, shared = (deployed(GQA, priced=False, **degrees).cost for degrees in ({}, {"decode_context": 2}))
    device = load_device("h200")
    link_s = sum(
        94 * device.link.collective_s(kind, size * n, 2) for kind, size, _, _ in sent(GQA, decode_context=2).values()
    )
    entry_bytes = 2 * 128 * 2  # a key and a value of the one head of a device
    read_s = 94 * entry_bytes * (kv - (kv + n / 2) / 2) / device.hbm_bytes_per_s
    difference = alone.iteration_s(decodes(n, kv)) - shared.iteration_s(decodes(n, kv))
    assert difference == pytest.approx(read_s - link_s, rel=0.02)


def test_arithmetic_is_not_saved_where_each_device_has_the_heads_of_all() -> None:
    """Eight tokens of each sequence are verified at once, so that attention is bound by its arithmetic."""
    alone, shared = (deployed(MLA, priced=False, **degrees).cost for degrees in ({}, {"decode_context": 8}))
    n = 16
    verified = decodes(n, 3_200_000)._replace(rows=8 * n, logit_rows=8 * n)
    assert shared.iteration_s(verified) > alone.iteration_s(verified)
    assert shared.iteration_s(decodes(n, 3_200_000)) < 0.7 * alone.iteration_s(decodes(n, 3_200_000))


def test_each_group_reads_all_that_is_cached_of_a_prompt() -> None:
    alone, shared = (deployed("llama-3.1-8b", priced=False, tensor=1, expert=1, prefill_context=n).cost for n in (1, 4))
    read_s = 1_000_000 * alone.spec.kv_bytes_per_token() / load_device("h200").hbm_bytes_per_s
    assert shared.iteration_s(prompt(16, 1_000_000)) > read_s
    assert alone.iteration_s(prompt(16, 1_000_000)) < 1.5 * shared.iteration_s(prompt(16, 1_000_000))


def test_prompts_of_latent_attention_gather_what_is_cached() -> None:
    alone, shared = (deployed(MLA, priced=False, **degrees).cost for degrees in ({}, {"decode_context": 8}))
    past = 500_000
    device = load_device("h200")
    gathered_s = 61 * device.link.collective_s("all_gather", past * 576 * 2, 8)
    difference = shared.iteration_s(prompt(2048, past)) - alone.iteration_s(prompt(2048, past))
    assert difference == pytest.approx(gathered_s, rel=1e-6)
    assert shared.iteration_s(prompt(2048)) == alone.iteration_s(prompt(2048))


def test_groups_share_a_prompt_and_the_decodes() -> None:
    cost: CostModel = deployed("llama-3.1-8b", tensor=1, expert=1).cost
    shared: CostModel = deployed("llama-3.1-8b", tensor=1, expert=1, prefill_context=4).cost
    one, four = cost.iteration_s(prompt(8192, 60_000)), shared.iteration_s(prompt(8192, 60_000))
    assert 0.24 < four / one < 0.45
    assert shared.iteration_s(decodes(32, 3_200_000)) < 0.6 * cost.iteration_s(decodes(32, 3_200_000))
    assert shared.peak_flops_per_s == 4 * cost.peak_flops_per_s


@pytest.mark.parametrize("degrees", [{"decode_context": 4, "kv_interleave": 2}, {"prefill_context": 2, "expert": 16}])
@pytest.mark.parametrize("model", [MLA])
def test_arrays_and_numbers_are_priced_alike_and_no_time_falls_when_sequences_grow(
    model: str, degrees: dict[str, int]
) -> None:
    cost, rng = deployed(model, **degrees).cost, random.Random(7)
    some = []
    for _ in range(60):
        n, tokens, past = rng.randrange(0, 80), rng.choice([0, 1, 700, 8000]), rng.randrange(0, 100_000)
        p = prompt(tokens, past) if tokens else Totals(0)
        kv = n * rng.randrange(1, 90_000)
        some.append(Totals(p.rows + n, *p[1:5], n, kv, n + p.logit_rows, 0, 0))
    some = [each for each in some if each.rows]
    arrays = Totals(*(np.array(column, np.int64) for column in zip(*some, strict=True)))
    assert cost.iteration_s(arrays).tolist() == [cost.iteration_s(each) for each in some]
    for each in some:
        if each.decode_seqs:
            more = each._replace(decode_kv_tokens=each.decode_kv_tokens + each.decode_seqs)
            assert cost.iteration_s(more) >= cost.iteration_s(each)


@pytest.mark.parametrize(
    ("model", "degrees", "says"),
    [
        (MLA, {"decode_context": 3}, "decode_context 3 does not divide parallel.tensor 8"),
        (
            GQA,
            {"decode_context": 4},
            r"for each of the 4 key-value heads of .*, and parallel.tensor is 8; give tensor 16",
        ),
        ("llama-3.1-70b", {"expert": 1, "decode_context": 2}, "for each of the 8 key-value heads"),
        ("gpt-oss-120b", {"prefill_context": 2}, "full attention alone, and gpt-oss-120b has others"),
        ("deepseek-v3.2", {"decode_context": 2}, "full attention alone"),
        (MLA, {"decode_context": 2, "prefill_context": 2}, "together with parallel.decode_context is not modelled"),
        (MLA, {"data": 2, "expert": 16, "prefill_context": 2}, "together with parallel.data is not modelled"),
        (MLA, {"kv_interleave": 4}, "kv_interleave is between devices that share KV"),
    ],
)
def test_what_cannot_be_or_is_not_modelled_is_one_sentence(model: str, degrees: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        deploy(model=model, hardware="h200", parallel={"tensor": 8, "expert": 8, **degrees})
