"""Images that are encoded in the steps of vLLM's scheduler: the budget of a step, the cache, and what steps take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.routers import RoundRobin
from policies.sglang import Sglang
from policies.vllm import Vllm
from sim.engine import FINISHED, Experiment, MachineSpec, ReplicaSpec, run
from sim.engine.record.columns import Columns
from sim.engine.serve.images import EncoderCache, PlannedImages
from sim.engine.spec.images import Image, ImagesSpec
from tests.engine.costs import Linear
from tests.engine.random_runs import an_experiment, assert_same, run_both_ways, with_scheduler
from tests.sample import few, some
from workloads import Trace

MS = 1_000_000
VLLM = Vllm(max_num_batched_tokens=100, max_num_seqs=10, async_scheduling=False)


def image(content: int, first: int = 0, tokens: int = 30) -> Image:
    return Image(content=content, first=first, tokens=tokens, embeddings=tokens, size=tokens)


def spec(*of: Sequence[Image], budget: int = 100, cache: int = 100) -> ImagesSpec:
    """An image of n tokens is encoded in n ms, several one after the other."""
    return ImagesSpec(of=tuple(map(tuple, of)), budget=budget, cache=cache, seconds=lambda sizes: sum(sizes) / 1e3)


def served(images: ImagesSpec | None, prompts: Sequence[int], *, scheduler: Any = VLLM, every_ns: int = 0) -> Columns:
    return run_both_ways(served_experiment(images, prompts, scheduler=scheduler, every_ns=every_ns))


def served_experiment(
    images: ImagesSpec | None, prompts: Sequence[int], *, scheduler: Any = VLLM, every_ns: int = 0
) -> Experiment:
    """A machine whose iterations take 1 ms, with requests that emit 2 tokens each."""
    n = len(prompts)
    trace = Trace(arrival_ns=[every_ns * i for i in range(n)], prompt_tokens=list(prompts), output_tokens=[2] * n)
    replica = ReplicaSpec(cost=Linear(fixed_s=1e-3), scheduler=scheduler, kv_blocks=1000, images=images)
    return Experiment(workload=trace, replicas=(replica,), router=RoundRobin())


def test_an_image_is_encoded_in_the_step_that_computes_its_first_token() -> None:
    found = served(spec([image(1, first=100, tokens=50)]), [200]).requests
    # 100 tokens of text; the image and the rest; a token.
    assert found["first_token_ns"].tolist() == [(1 + 51) * MS]
    assert found["finish_ns"].tolist() == [(1 + 51 + 1) * MS]
    assert (found["encoded_images"].tolist(), found["encode_ns"].tolist()) == ([1], [50 * MS])


def test_equal_images_are_encoded_once() -> None:
    together = served(spec([image(1)], [image(1)]), [40, 40]).requests
    assert together["first_token_ns"].tolist() == [31 * MS] * 2
    apart = served(spec([image(1)], [image(1)]), [40, 40], every_ns=100 * MS).requests
    assert (apart["first_token_ns"] - apart["arrival_ns"]).tolist() == [31 * MS, 1 * MS]
    for found in (together, apart):
        assert (found["encoded_images"].tolist(), found["image_hits"].tolist()) == ([1, 0], [0, 1])


def test_a_chunk_ends_ahead_of_an_image_beyond_the_budget() -> None:
    images = spec([image(1), image(2, first=35)], budget=40)
    found = served(images, [80]).requests
    # 35 tokens with the first image, 45 with the second.
    assert found["first_token_ns"].tolist() == [(31 + 31) * MS]


def test_encodings_stay_until_their_room_is_needed_and_the_oldest_goes() -> None:
    contents = [1, 2, 1, 3, 1, 2]
    images = spec(*([image(content)] for content in contents), cache=60)
    found = served(images, [40] * 6, every_ns=100 * MS).requests
    # 1 and 2 fill the cache; 1 is used and 3 takes the room of 2; 1 is used again, so that 2 takes that of 3.
    assert found["encoded_images"].tolist() == [1, 1, 0, 1, 0, 1]


def test_a_request_waits_for_room_that_another_needs() -> None:
    images = spec([image(1, tokens=60)], [image(2, tokens=60)], budget=120, cache=60)
    found = served(images, [110, 70]).requests
    # The first computes 100 tokens, of which 60 are its image's, and gives the encoding up; then the second is admitted.
    assert found["scheduled_ns"].tolist() == [0, 61 * MS]


def test_a_preempted_sequence_takes_its_part_of_the_budget_back() -> None:
    planned = PlannedImages(spec([image(1)], [image(2)]).of, 30, EncoderCache(100))
    assert planned.computes(0, 0, 40) == 40
    assert planned.fits(1, 0, 40) == 0
    planned.undo(0)
    assert planned.fits(1, 0, 40) == 40


def test_an_image_right_behind_a_chunk_is_encoded_with_the_next_one() -> None:
    planned = PlannedImages(spec([image(1, first=100)]).of, 100, EncoderCache(100))
    assert planned.fits(0, 0, 100) == 100
    assert planned.take(0) == []
    assert planned.fits(0, 100, 1) == 1
    assert planned.take(0) == [image(1, first=100)]


def test_planning_changes_no_cache() -> None:
    cache = EncoderCache(50)
    cache.put(0, image(1))
    cache.leaves(0, image(1))
    planned = PlannedImages(spec([image(1)], [image(2)]).of, 100, cache.copy())
    assert planned.computes(1, 0, 40) == 40
    assert cache.held == 30
    assert cache.uses(5, image(1))


def test_a_chunk_behind_others_ends_ahead_of_an_image_too() -> None:
    planned = PlannedImages(spec([image(1, first=70)]).of, 10, EncoderCache(100))
    assert planned.fits(0, 40, 50) == 30
    assert planned.fits(0, 70, 50) == 0


def test_an_encoding_is_needed_until_its_tokens_are_computed_and_then_kept_for_others() -> None:
    """The second and third of three requests at once find the image of the first, which has no room beside another."""
    images = spec([image(1)], [image(1)], [image(2)], cache=50)
    found = served(images, [40, 40, 40]).requests
    # A step computes two of them. The third gets its room when both have passed the image, which a step ahead of theirs has not.
    assert found["scheduled_ns"].tolist() == [0, 0, 31 * MS]
    assert found["first_token_ns"].tolist() == [31 * MS, 31 * MS, (31 + 31) * MS]


def test_a_request_that_leaves_ahead_of_its_image_gives_its_encoding_up() -> None:
    """Its client goes while the last part of the image has yet to be computed; the next image needs the room."""
    one = replace(
        served_experiment(spec([image(1, tokens=60)], [image(2, tokens=60)], cache=60), [170, 80], every_ns=MS),
    )
    stays = run(one, check_invariants=True).requests
    assert isinstance(one.workload, Trace)
    gone = replace(one, workload=replace(one.workload, abort_ns=np.array([30 * MS, -1])))
    leaves = run(gone, check_invariants=True).requests
    assert stays["encoded_images"].tolist() == leaves["encoded_images"].tolist() == [1, 1]
    assert leaves["scheduled_ns"][1] <= stays["scheduled_ns"][1]


# SGLang: whatever chunks need is encoded, and kept as far as there is room.


SGLANG = Sglang(chunked_prefill_size=100, max_running_requests=10, disable_overlap_schedule=True)


def as_needed(*of: Sequence[Image], cache: int = 100) -> ImagesSpec:
    return replace(spec(*of), budget=None, cache=cache)


def by_sglang(images: ImagesSpec, prompts: Sequence[int], every_ns: int = 0) -> Any:
    return served(images, prompts, scheduler=SGLANG, every_ns=every_ns).requests


def test_all_images_of_a_step_are_encoded_whatever_room_there_is() -> None:
    found = by_sglang(as_needed([image(1), image(2, first=30)], cache=0), [80])
    assert found["first_token_ns"].tolist() == [61 * MS]
    assert found["encoded_images"].tolist() == [2]


def test_an_image_in_two_chunks_is_encoded_twice_where_it_cannot_be_kept() -> None:
    for cache, encoded in ((100, 1), (20, 2)):
        found = by_sglang(as_needed([image(1, first=80)], cache=cache), [150])
        assert (found["encoded_images"].tolist(), found["image_hits"].tolist()) == ([encoded], [0])
        assert found["first_token_ns"].tolist() == [(2 + 30 * encoded) * MS]


def test_an_image_that_ends_where_a_chunk_begins_is_not_of_that_chunk() -> None:
    found = by_sglang(as_needed([image(1, first=66), image(2, first=96)], cache=0), [150])
    # Six pages of 16 tokens with the first image, and the rest with the second.
    assert (found["encoded_images"].tolist(), found["image_hits"].tolist()) == ([2], [0])
    assert found["first_token_ns"].tolist() == [62 * MS]


def test_equal_images_of_a_step_are_encoded_once_and_later_ones_are_found() -> None:
    together = by_sglang(as_needed([image(1)], [image(1)], cache=0), [40, 40])
    assert (together["encoded_images"].tolist(), together["image_hits"].tolist()) == ([1, 0], [0, 1])
    contents = [1, 2, 1, 3, 1, 2]
    found = by_sglang(as_needed(*([image(content)] for content in contents), cache=60), [40] * 6, 100 * MS)
    assert found["encoded_images"].tolist() == [1, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("seed", some(range(60)))
def test_what_sglang_keeps_is_what_a_count_by_hand_keeps(seed: int) -> None:
    """One request at a time, in one chunk; all images are looked up, and then those that were missing are kept."""
    rng = random.Random(f"kept by sglang {seed}")
    sizes, room = [rng.randrange(1, 9) for _ in range(8)], rng.randrange(0, 30)
    of: list[list[Image]] = []
    for _ in range(30):
        contents = rng.choices(range(8), k=rng.randrange(1, 4))
        firsts = np.cumsum([0, *(sizes[content] for content in contents)]).tolist()
        of.append([image(content, first, sizes[content]) for content, first in zip(contents, firsts, strict=False)])
    kept: list[int] = []
    encoded: list[int] = []
    for images in of:
        asked = list(dict.fromkeys(each.content for each in images))
        found = [content for content in asked if content in kept]
        kept = [*(each for each in kept if each not in found), *found]
        new = [content for content in asked if content not in found]
        encoded.append(len(new))
        for content in new:
            if sizes[content] <= room:
                kept.append(content)
            while sum(sizes[each] for each in kept) > room:
                del kept[0]
    requests = by_sglang(as_needed(*of, cache=room), [40] * 30, 100 * MS)
    assert requests["encoded_images"].tolist() == encoded
    assert requests["image_hits"].tolist() == [len(images) - n for images, n in zip(of, encoded, strict=True)]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: spec([image(1, tokens=60)], budget=50), "hold at least one image, of 60 embeddings"),
        (lambda: spec([image(1), image(2, first=20)]), "stand one behind the other"),
        (lambda: ReplicaSpec(cost=Linear(), scheduler=lambda view: None, kv_blocks=1, images=spec([])), "does not know of images"),
        (lambda: replace(a_replica(0), scheduler=SGLANG), "without a budget; leave budget_tokens out"),
        (lambda: replace(a_replica(0), images=as_needed([])), "plans which images are encoded, and needs a budget"),
        (lambda: MachineSpec(hosted=(a_replica(0), a_replica(1))), "models that share a machine, are not modelled"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(wrong: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrong()


def a_replica(model: int) -> ReplicaSpec:
    return ReplicaSpec(cost=Linear(), scheduler=VLLM, kv_blocks=100, images=spec([]), model=model)


def some_images(rng: random.Random, prompts: Sequence[int]) -> ImagesSpec:
    """Images anywhere in each prompt, of few contents, each of which has one size."""
    sizes = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 12))]
    of: list[tuple[Image, ...]] = []
    for prompt in prompts:
        at, mine = 0, list[Image]()
        while rng.random() < 0.6:
            content = rng.randrange(len(sizes))
            first = at + rng.choice([0, 0, rng.randrange(30)])
            if first + sizes[content] > prompt:
                break
            mine.append(image(content, first, sizes[content]))
            at = first + sizes[content]
        of.append(tuple(mine))
    largest = max(sizes)
    return ImagesSpec(
        of=of, budget=largest + rng.randrange(60), cache=largest + rng.choice([0, rng.randrange(40), 10_000]),
        seconds=lambda kinds: 1e-4 * sum(kinds),
    )  # fmt: skip


def with_images(experiment: Experiment, seed: int, images: ImagesSpec | None = None) -> Experiment:
    """The experiment with vLLM's or SGLang's scheduler on machines of one model each, whose prompts have images."""
    rng = random.Random(f"images {seed}")
    found = some_images(rng, experiment.workload.prompt_tokens.tolist()) if images is None else images
    if seed % 4 == 3:
        size = rng.choice([-1, rng.randrange(20, 200)])
        scheduler = Sglang(
            chunked_prefill_size=size,
            max_running_requests=rng.randrange(1, 12),
            enable_mixed_chunk=rng.random() < 0.5 and size > 20,
            disable_overlap_schedule=rng.random() < 0.5,
        )
        return on_each(experiment, scheduler, replace(found, budget=None, cache=rng.choice([0, 30, 10_000])))
    scheduler = Vllm(
        max_num_batched_tokens=rng.randrange(20, 200), max_num_seqs=rng.randrange(1, 12),
        long_prefill_token_threshold=rng.choice([0, 0, 7]), scheduling_policy=rng.choice(["fcfs", "priority"]),
        async_scheduling=rng.random() < 0.5,
    )  # fmt: skip
    return on_each(experiment, scheduler, found)


def on_each(experiment: Experiment, scheduler: Any, images: ImagesSpec) -> Experiment:
    alone = [
        each.hosted[0] if isinstance(each, MachineSpec) else each
        for each in with_scheduler(experiment, scheduler).replicas
    ]
    return replace(experiment, replicas=tuple(replace(each, images=images) for each in alone))


def one_model(seed: int) -> Experiment | None:
    found = an_experiment(seed, speculative=seed % 3 == 0)
    alone = [each.hosted[0] if isinstance(each, MachineSpec) else each for each in found.replicas]
    return None if any(each.model is not None for each in alone) else replace(found, replicas=tuple(alone))


@pytest.mark.parametrize("seed", few(some(range(250)), 4))
def test_random_runs_end_and_are_the_same_with_spans_and_without(seed: int) -> None:
    experiment = one_model(seed)
    if experiment is None:
        return
    experiment = with_images(experiment, seed)
    found = run_both_ways(experiment)
    requests, (replica, *_) = found.requests, experiment.replicas
    assert isinstance(replica, ReplicaSpec)
    images = replica.images
    assert images is not None
    for id_ in np.flatnonzero(requests["status"] == FINISHED).tolist():
        counted = requests["encoded_images"][id_] + requests["image_hits"][id_]
        in_cache = requests["prefix_hit_tokens"][id_] if "prefix_hit_tokens" in requests else 0
        assert counted >= sum(each.first >= in_cache for each in images.of[id_])


@pytest.mark.parametrize("seed", few(some(range(120)), 6))
def test_prompts_without_images_are_served_as_without_an_encoder_to_the_nanosecond(seed: int) -> None:
    experiment = one_model(seed)
    if experiment is None:
        return
    n = len(experiment.workload)
    nothing = ImagesSpec(of=((),) * n, budget=1, cache=1, seconds=lambda _: 1.0)
    encoding = with_images(experiment, seed, nothing)
    without = replace(encoding, replicas=tuple(replace(each, images=None) for each in encoding.replicas))
    assert_same(run(without), run(encoding))
