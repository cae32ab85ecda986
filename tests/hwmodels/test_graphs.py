"""Decode steps as CUDA graphs: padded to the sizes that stacks capture, launched kernel by kernel beyond them."""

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.graphs import GraphSettings, captured_sizes, padded
from hwmodels.overheads import serving_stack
from hwmodels.parallel import ParallelConfig
from hwmodels.totals import Totals


def cost_of(stack="vllm", model="llama-3.1-8b", hardware="h100-sxm", parallel=None, **graphs):
    made_by = Calibrated.for_stack(stack, graphs=GraphSettings(**graphs))
    return deploy(model=model, hardware=hardware, parallel=parallel, cost=made_by).cost


def decodes(n, context=500):
    return Totals(n, 0, 0, 0, 0, n, n * context, n)


@pytest.mark.parametrize(
    ("stack", "largest", "sizes"),
    [
        # vLLM 0.32.0's VllmConfig with max_num_seqs 128, SGLang 0.5.23's generate_decode_cuda_graph_batch_sizes(args, 300).
        ("vllm", 256, [1, 2, 4, *range(8, 257, 8)]),
        ("vllm", 512, [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]),
        ("vllm", 6, [1, 2, 4, 6]),
        ("sglang", 300, [1, 2, 4, 8, 12, *range(16, 257, 8), 272, 288, 300]),
        ("trtllm", 600, [1, 2, 4, *range(8, 129, 8), 256, 512, 600]),
        ("trtllm", 128, [1, 2, 4, *range(8, 129, 8)]),
        ("trtllm", 48, [1, 2, 4, *range(8, 49, 8)]),
        ("eager", 512, []),
    ],
)
def test_sizes_that_stacks_capture(stack, largest, sizes):
    assert list(captured_sizes(stack, GraphSettings(), largest)) == sizes


def test_rows_are_padded_to_the_next_size():
    assert padded((1, 2, 4, 8), np.arange(11.0)).tolist() == [0, 1, 2, 4, 4, 8, 8, 8, 8, 9, 10]


def test_a_decode_step_takes_as_long_as_its_graph():
    exact, graph = cost_of(sizes=tuple(range(1, 513))), cost_of()
    own = serving_stack("vllm").overheads
    # Seventeen sequences run the graph of 24, but for what depends on the sequences: attention, sampling and host work.
    dense = [exact.iteration_s(Totals(n, 0, 0, 0, 0, 0, 0, 0)) - n * own.row_s for n in (17, 24)]
    assert graph.iteration_s(decodes(17)) - exact.iteration_s(decodes(17)) == pytest.approx(
        dense[1] - dense[0], abs=1e-12
    )
    assert graph.iteration_s(decodes(16)) == exact.iteration_s(decodes(16))
    # A prompt is launched, and nothing of it is padded.
    mixed = Totals(1017, 1000, 1, 500_500, 1000, 17, 8500, 18)
    assert graph.iteration_s(mixed) == exact.iteration_s(mixed)


def test_beyond_the_largest_graph_every_kernel_is_launched():
    cost, layer_s = cost_of(largest=32), serving_stack("eager").overheads.layer_host_s
    host_s = 33 * serving_stack("vllm").overheads.sequence_s
    assert cost.iteration_s(decodes(32)) < 32 * layer_s
    assert cost.iteration_s(decodes(33)) == pytest.approx(32 * layer_s + host_s)
    assert cost.iteration_s(decodes(33)) == pytest.approx(cost_of(eager=True).iteration_s(decodes(33)))


def test_an_eager_server_pads_nothing_and_launches_everything():
    cost, layer_s = cost_of(eager=True), serving_stack("eager").overheads.layer_host_s
    host_s = serving_stack("vllm").overheads.sequence_s
    assert cost.kernels.captured == ()
    assert cost.iteration_s(decodes(1)) == pytest.approx(32 * layer_s + host_s)
    assert cost.iteration_s(Totals(8, 8, 1, 36, 8, 0, 0, 1)) == pytest.approx(32 * layer_s + host_s)


def test_graphs_for_decode_steps_alone_leave_steps_with_prompts_to_be_launched():
    graph, alone, eager = cost_of(), cost_of(decode_only=True), cost_of(eager=True)
    assert alone.iteration_s(decodes(5)) == graph.iteration_s(decodes(5)) < eager.iteration_s(decodes(5))
    for mixed in (Totals(8, 8, 1, 36, 8, 0, 0, 1), Totals(25, 8, 1, 36, 8, 17, 8500, 18)):
        assert alone.iteration_s(mixed) == eager.iteration_s(mixed) > graph.iteration_s(mixed)
    long = Totals(8192, 8192, 1, 8192 * 8193 // 2, 8192, 0, 0, 1)
    assert alone.iteration_s(long) == graph.iteration_s(long)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(("model", "layers", "latent"), [("qwen3-30b-a3b", 48, 0), ("deepseek-v3", 61, 61)])
def test_a_layer_with_experts_is_launched_in_the_time_that_prompts_of_the_stack_say(stack, model, layers, latent):
    # Prompts are launched with graphs and without: what they take was fitted to whole layers, of which nothing is counted twice.
    of_prompts, eager = (cost_of(stack, model, "b200", ParallelConfig(tensor=8), eager=each) for each in (False, True))
    own = serving_stack(stack).overheads
    launched_s = max(
        layers * serving_stack("eager").overheads.layer_host_s,
        layers * own.expert_host_s + latent * own.latent_host_s,
    )
    host_s = own.step_s + own.sequence_s
    assert eager.iteration_s(decodes(1)) == pytest.approx(launched_s + host_s)
    short = Totals(8, 8, 1, 36, 8, 0, 0, 1)
    assert eager.iteration_s(short) == pytest.approx(max(launched_s + host_s, of_prompts.iteration_s(short)))


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_scalars_and_arrays_agree_and_time_does_not_fall(stack, model):
    parallel = ParallelConfig(data=2, expert=2) if model.startswith("qwen3-30b") else None
    cost = cost_of(stack, model, "h100-sxm", parallel, largest=64)
    rng = np.random.default_rng(5)
    n, prompt = rng.integers(0, 140, 300), rng.integers(0, 40, 300) * rng.integers(0, 2, 300)
    n = np.where(n + prompt == 0, 1, n)
    some = (prompt > 0).astype(np.int64)
    pairs = prompt * (prompt + 1) // 2
    batch = Totals(n + prompt, prompt, some, pairs, prompt, n, n * 700, n + some, 0 * n, 0 * n)
    found = cost.iteration_s(batch).tolist()
    one_by_one = [Totals(*(int(column[i]) for column in batch)) for i in range(len(n))]
    assert found == [cost.iteration_s(totals) for totals in one_by_one]
    for totals in one_by_one[:60]:
        more = totals._replace(
            rows=totals.rows + 1, decode_seqs=totals.decode_seqs + 1, logit_rows=totals.logit_rows + 1
        )
        assert cost.iteration_s(more) >= cost.iteration_s(totals)
        begun = totals._replace(rows=totals.rows + 1, prefill_rows=totals.prefill_rows + 1, prefill_chunks=1)
        begun = begun._replace(prefill_pairs=totals.prefill_pairs + 1, prefill_kv_tokens=totals.prefill_kv_tokens + 1)
        assert cost.iteration_s(begun) >= cost.iteration_s(totals)


def test_ranks_exchange_the_rows_of_the_graph():
    cost = cost_of("vllm", "qwen3-30b-a3b", "h200", ParallelConfig(data=4, expert=4))
    exact = cost_of("vllm", "qwen3-30b-a3b", "h200", ParallelConfig(data=4, expert=4), sizes=tuple(range(1, 513)))
    # Without attention and host work, which are of the sequences that there are.
    steps = [[Totals(n, 0, 0, 0, 0, 0, 0, 0)] + [Totals(1, 0, 0, 0, 0, 0, 0, 0)] * 3 for n in (17, 24)]
    own = serving_stack("vllm").overheads
    experts = exact._stages[0].work.experts
    woken = [48 * float(exact.kernels.moe_s(np.array([rows]), experts)[0]) for rows in (20.0, 27.0)]
    difference = exact.common_step(steps[1]) - exact.common_step(steps[0]) - 7 * own.row_s - (woken[1] - woken[0])
    assert cost.common_step(steps[0]) - exact.common_step(steps[0]) == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"largest": 0}, "largest of CUDA graphs are whole numbers of at least 1; got 0"),
        ({"sizes": (4, -1)}, "sizes of CUDA graphs are whole numbers of at least 1; got -1"),
        ({"eager": True, "decode_only": True}, "leave out eager or decode_only"),
        ({"sizes": ()}, "sizes of CUDA graphs has none; give eager: true for a server without graphs"),
        ({"sizes": (4,), "largest": 8}, "sizes of CUDA graphs say the largest too; leave largest out"),
        ({"eager": True, "largest": 8}, r"a server without graphs \(eager\) has no sizes of them"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        GraphSettings(**settings)


def test_stacks_without_lists_are_refused():
    with pytest.raises(
        ValueError, match="CUDA graphs of given sizes are of vllm, trtllm, sglang on GPUs; ideal on h100-sxm has none"
    ):
        cost_of("ideal", largest=8)
    assert cost_of("ideal").kernels.captured is None
