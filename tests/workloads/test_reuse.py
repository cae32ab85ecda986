"""The tokens of a trace that an ideal prefix cache finds: stack distances against a cache that is played out block by block."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from scipy import optimize

from workloads import Trace, read_trace, reuse

EVER_LARGER = (1, 2, 3, 5, 8, 20, 10**9)


def trace_of(
    prompts: list[list[int]], *, block_tokens: int = 4, prompt_tokens: list[int] | None = None, model_index=None
) -> Trace:
    n = len(prompts)
    return Trace(
        arrival_ns=np.arange(n),
        prompt_tokens=np.array(prompt_tokens or [max(1, len(blocks) * block_tokens) for blocks in prompts]),
        output_tokens=np.ones(n, dtype=np.int64),
        prefix_blocks=np.array([block for blocks in prompts for block in blocks], dtype=np.int64),
        prefix_offsets=np.concatenate(([0], np.cumsum([len(blocks) for blocks in prompts]))),
        prefix_block_tokens=block_tokens,
        models=() if model_index is None else ("a", "b"),
        model_index=model_index,
    )


def played_out(trace: Trace, capacity_blocks: int, *, chained: bool = False) -> int:
    """Blocks found by a least-recently-used cache of keys that hold the whole prefix, the last block of a prompt used first.

    Ids that are *chained* already are keys by themselves.
    """
    cache: OrderedDict[object, None] = OrderedDict()
    found = 0
    for row in range(len(trace)):
        blocks = tuple(trace.prefix_of(row).tolist())
        for length in range(len(blocks), 0, -1):
            key = blocks[length - 1] if chained else (trace.model_of(row), *blocks[:length])
            if key in cache:
                found += 1
                cache.move_to_end(key)
            else:
                if len(cache) >= capacity_blocks:
                    cache.popitem(last=False)
                cache[key] = None
    return found


def test_two_sessions_and_one_slot_by_hand():
    # Sessions in turn push each other's block out of a cache of one; a cache of two finds all but the first of each.
    curve = reuse(trace_of([[1], [2], [1], [2], [1]]))
    assert curve.block_hit_rate([1, 2]).tolist() == [0.0, 3 / 5]
    assert curve.best_hit_rate == 3 / 5
    assert curve.tokens_for(1.0) == 8


def test_the_tail_of_a_prompt_goes_before_its_head():
    # [1 2 3] then [9]: a cache of three gave up block 3, so the third prompt finds 1 and 2.
    curve = reuse(trace_of([[1, 2, 3], [9], [1, 2, 3]]))
    assert curve.block_hit_rate([3, 4]) == pytest.approx([0.0, 3 / 7])
    shorter = reuse(trace_of([[1, 2, 3], [9], [1, 2]]))
    assert shorter.block_hit_rate([2, 3]) == pytest.approx([0.0, 2 / 6])


def test_a_last_block_counts_the_tokens_that_fill_it():
    curve = reuse(trace_of([[1, 2], [1, 2]], prompt_tokens=[5, 5]))
    assert curve.hit_tokens[-1] == 5
    assert curve.best_hit_rate == 0.5


def test_equal_ids_after_other_ids_and_for_other_models_are_other_blocks():
    assert reuse(trace_of([[1, 7], [2, 7]])).best_hit_rate == 0.0
    assert reuse(trace_of([[1], [1]], model_index=np.array([0, 1]))).best_hit_rate == 0.0
    assert reuse(trace_of([[1], [1]], model_index=np.array([0, 0]))).best_hit_rate == 0.5


@pytest.mark.parametrize("seed", range(20))
def test_random_prompts_are_found_as_a_cache_played_out_finds_them(seed: int):
    draw = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for _ in range(60):
        old = prompts[draw.integers(len(prompts))] if prompts and draw.random() < 0.7 else []
        prompts.append([*old[: draw.integers(len(old) + 1)], *draw.integers(0, 6, draw.integers(0, 4)).tolist()])
    trace = trace_of(prompts, model_index=draw.integers(0, 2, 60) if seed % 2 else None)
    curve = reuse(trace)
    found = [played_out(trace, size) for size in EVER_LARGER]
    assert (curve.block_hit_rate(EVER_LARGER) * curve.blocks).round().astype(int).tolist() == found


def test_the_conversation_trace_is_found_as_a_cache_played_out_finds_it(real_trace):
    trace = read_trace(real_trace("mooncake_conversation.jsonl")).limit(3000)
    curve = reuse(trace)
    assert round(float(curve.block_hit_rate(10_000)) * curve.blocks) == played_out(trace, 10_000, chained=True)


@pytest.mark.slow(reason="a whole recorded trace")
@pytest.mark.parametrize("capacity", [1_000, 10_000, 50_000, 10**9])
def test_the_whole_conversation_trace_is_found_as_a_cache_played_out_finds_it(real_trace, capacity: int):
    trace = read_trace(real_trace("mooncake_conversation.jsonl"))
    curve = reuse(trace)
    assert round(float(curve.block_hit_rate(capacity)) * curve.blocks) == played_out(trace, capacity, chained=True)
    assert float(curve.block_hit_rate(10**9)) == pytest.approx(0.366, abs=0.0005)


def test_an_answer_that_is_named_is_held_for_the_next_prompt():
    # Two blocks of prompt, one of answer, and a prompt that goes on from both.
    trace = Trace(
        arrival_ns=[0, 1],
        prompt_tokens=[8, 16],
        output_tokens=[4, 1],
        prefix_blocks=[1, 2, 3, 1, 2, 3, 4],
        prefix_offsets=[0, 3, 7],
        prefix_block_tokens=4,
    )
    assert reuse(trace).hit_tokens.tolist() == [12]
    assert reuse(trace).blocks == 6


@pytest.mark.slow(reason="enough samples for narrow statistics")
@pytest.mark.parametrize("capacity", [50, 500, 3000])
def test_independent_zipf_references_are_found_as_che_approximates(capacity: int):
    # Che, Tung and Wang, "Hierarchical Web Caching Systems" (IEEE JSAC 20(7), 2002): block i is found with probability
    # 1 - exp(-p_i T), where the sum of these over all blocks is the cache's size.
    popularity = np.arange(1, 10_001) ** -0.9
    popularity /= popularity.sum()
    drawn = np.random.default_rng(5).choice(len(popularity), size=400_000, p=popularity)
    trace = trace_of([[block] for block in drawn.tolist()])
    horizon = optimize.brentq(lambda t: float(np.sum(-np.expm1(-popularity * t))) - capacity, 1.0, 1e9)
    expected = float(np.sum(popularity * -np.expm1(-popularity * horizon)))
    # First references are misses of an empty cache, which the approximation, of a cache in its stride, does not count.
    assert float(reuse(trace).block_hit_rate(capacity)) == pytest.approx(expected, rel=0.01, abs=capacity / len(drawn))


def test_a_trace_without_block_ids_is_refused():
    with pytest.raises(ValueError, match="does not say which prompts share blocks"):
        reuse(Trace(arrival_ns=np.array([0]), prompt_tokens=np.array([4]), output_tokens=np.array([1])))
