"""Tokens that choose experts, and devices that hold them: counted against drawn tokens, vLLM's balancer, and closed forms."""

import dataclasses

import numpy as np
import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.deployment import deploy
from hwmodels.device import Interconnect, load_device
from hwmodels.experts import ExpertLayout, ExpertLoad, Zipf, balanced, chances, read_popularity
from hwmodels.kernels.routing import routed_by
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals

QWEN, H200 = load_model("qwen3-235b-a22b"), load_device("h200")


def layout(popularity, **settings):
    return ExpertLayout(popularity=popularity, **settings)


def drawn(load: ExpertLoad, tokens: int, times: int = 400) -> np.ndarray:
    """Tokens of each copy, shape (times, ranks, copies): choices without replacement at exactly the chances of *load*.

    Systematic sampling (Madow 1949) over the experts in random order; copies of an expert take turns at random.
    """
    rng = np.random.default_rng(7)
    chosen, n = np.array(load.chosen), len(load.chosen)
    k = round(load.per_token)
    counts = np.zeros((times, n))
    for i in range(times):
        for _ in range(tokens):
            order = rng.permutation(n)
            edges = np.cumsum(chosen[order])
            counts[i, order[np.searchsorted(edges, rng.random() + np.arange(k))]] += 1
    held = np.array(load.held)
    copies = np.bincount(held.ravel(), minlength=n)
    found = np.zeros((times, *held.shape))
    for expert in range(n):
        where = np.argwhere(held == expert)
        share = np.full(copies[expert], 1 / copies[expert])
        found[:, where[:, 0], where[:, 1]] = rng.multinomial(counts[:, expert].astype(int), share)
    return found


LOADS = {
    "even": layout("even").load(32, 4, 4),
    "zipf": layout(Zipf(zipf=0.8)).load(32, 4, 4),
    "balanced": layout(Zipf(zipf=0.8), placement="eplb", redundant=8).load(32, 4, 4),
    "one rank": layout(Zipf(zipf=1.2)).load(32, 4, 1),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_what_is_expected_is_what_is_drawn(name, tokens):
    load = LOADS[name]
    counts = drawn(load, tokens)
    awake = (counts > 0).sum(axis=-1)
    # Four standard errors of 400 draws: one false alarm in 1e4 of each.
    assert load.awake(tokens) == pytest.approx(awake.mean(axis=0), abs=4 * awake.std(axis=0).max() / 20 + 1e-9)
    slots = counts.sum(axis=-1)
    assert load.rank_slots * tokens == pytest.approx(slots.mean(axis=0), abs=4 * slots.std(axis=0).max() / 20 + 1e-9)
    # Independent normal loads are an approximation, and a token is few: within 12 %, 6 % from six tokens on.
    rel = 0.12 if tokens == 1 else 0.06
    assert load.busiest_slots([tokens])[0] == pytest.approx(slots.max(axis=1).mean(), rel=rel)


@pytest.mark.parametrize("exponent", [0.5, 1.5])
def test_the_busiest_experts_share_of_zipf_is_that_of_a_plain_count(exponent):
    """Three of 16 experts are chosen, in proportion to 1 / rank^s; what one would have above 1 is the others'."""
    weights = [1 / rank**exponent for rank in range(1, 17)]
    share = [3 * weight / sum(weights) for weight in weights]
    if share[0] > 1:
        share = [1.0, *(2 * weight / sum(weights[1:]) for weight in weights[1:])]
    assert max(share) <= 1
    load = layout(Zipf(zipf=exponent)).load(16, 3, 4)
    assert sorted(load.chosen, reverse=True) == pytest.approx(share)
    # Ranks hold four of them in the order of their numbers, whoever is popular.
    assert load.held == tuple(tuple(range(first, first + 4)) for first in (0, 4, 8, 12))
    per_rank = [sum(load.chosen[first : first + 4]) for first in (0, 4, 8, 12)]
    assert load.rank_slots == pytest.approx(per_rank)
    # The busiest rank of batches that are drawn one token after the other, within 99 % of their mean.
    rng = np.random.default_rng(5)
    order = np.array([rng.permutation(16) for _ in range(4000)])
    edges = np.cumsum(np.array(load.chosen)[order], axis=1)
    at = rng.random(4000)[:, None] + np.arange(3)
    picked = np.array([row[np.searchsorted(edge, each)] for row, edge, each in zip(order, edges, at, strict=True)])
    on_rank = (picked[..., None] // 4 == np.arange(4)).sum(axis=1)  # (token, rank)
    busiest = on_rank.reshape(20, 200, 4).sum(axis=1).max(axis=1)
    half = 2.861 * busiest.std(ddof=1) / np.sqrt(20)  # 99 % of Student's t with 19 degrees
    assert load.busiest_slots([200.0])[0] == pytest.approx(busiest.mean(), abs=half)


def test_experts_are_held_in_rows_or_dealt_out_and_which_are_popular_is_drawn():
    zipf = Zipf(zipf=0.8)
    rows, dealt = (layout(zipf, placement=how).load(8, 2, 2) for how in ("linear", "round_robin"))
    assert rows.held == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert dealt.held == ((0, 2, 4, 6), (1, 3, 5, 7))
    other = layout(Zipf(zipf=0.8, seed=1)).load(8, 2, 2)
    assert rows.chosen == dealt.chosen != other.chosen
    assert sorted(rows.chosen) == sorted(other.chosen)
    assert list(rows.chosen) != sorted(rows.chosen, reverse=True)


@pytest.mark.parametrize(
    ("weights", "per_token", "tokens"),
    [
        (
            [27.0] * 4 + [24.0] * 4 + [21.0] * 4 + [18.0] * 4,
            3,
            30,
        ),  # the popular rank is the fullest in most batches, not in all
        ([1.0] * 8, 6, 40),  # nearly all are chosen, which leaves little to chance
    ],
)
def test_the_busiest_of_ranks_that_differ_little_is_that_of_drawn_batches(weights, per_token, tokens):
    load = layout(tuple(weights)).load(len(weights), per_token, 4)
    busiest = drawn(load, tokens).sum(axis=-1).max(axis=1).mean()
    assert load.busiest_slots([float(tokens)])[0] == pytest.approx(busiest, rel=0.025)


def test_experts_that_a_batch_wakes_in_closed_form():
    even = LOADS["even"]
    assert even.distinct(10) == pytest.approx(32 * (1 - (1 - 4 / 32) ** 10))
    uneven = LOADS["zipf"]
    assert uneven.distinct(10) == pytest.approx(sum(1 - (1 - p) ** 10 for p in uneven.chosen))
    assert uneven.distinct(10) < even.distinct(10)


def test_a_token_visits_as_many_ranks_as_are_drawn():
    # Of 32 experts over 4 ranks a token misses a rank with C(24, 4) / C(32, 4).
    assert LOADS["even"].hits() == pytest.approx([1 - 10626 / 35960] * 4)
    load = LOADS["zipf"]
    visited = (drawn(load, 1, times=3000).sum(axis=-1) > 0).mean(axis=0)
    assert load.hits() == pytest.approx(visited, abs=0.06)
    assert load.hits(2) == pytest.approx(
        (drawn(load, 1, times=3000).reshape(3000, 2, -1).sum(axis=-1) > 0).mean(axis=0), abs=0.06
    )


def test_no_expert_is_chosen_twice_by_a_token():
    found = chances([100.0, 1.0, 1.0, 2.0], 2)
    assert found == pytest.approx([1.0, 0.25, 0.25, 0.5])
    with pytest.raises(ValueError, match="tokens choose 3 experts, and 2 have a popularity above 0"):
        chances([1.0, 0.0, 5.0], 3)


# vLLM 0.32.0, DefaultEplbPolicy.rebalance_experts_hierarchical(weight, 16, 1, 1, num_gpus), run once on these weights
# of DeepSeek's published example (github.com/deepseek-ai/eplb, README).
WEIGHTS = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
VLLM_EPLB = {
    2: [[10, 0, 5, 1, 1, 4, 4, 7], [10, 11, 5, 8, 3, 9, 2, 6]],
    4: [[10, 8, 3, 7], [10, 1, 1, 4], [0, 5, 4, 2], [11, 5, 9, 6]],
    8: [[10, 6], [10, 7], [0, 2], [11, 4], [5, 9], [5, 4], [8, 3], [1, 1]],
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_copies_lie_where_vllm_puts_them(ranks):
    assert [list(rank) for rank in balanced(WEIGHTS, ranks, redundant=4)] == VLLM_EPLB[ranks]


def step_s(made_by, sequences, **parallel):
    cost = made_by(QWEN, H200, ParallelConfig(**parallel))
    return cost.iteration_s(Totals(sequences, 0, 0, 0, 0, sequences, sequences * 500, sequences))


@pytest.mark.parametrize("made_by", [Roofline, Calibrated.for_stack("vllm")], ids=["roofline", "calibrated"])
def test_uneven_experts_cost_and_copies_of_the_hottest_give_it_back(made_by):
    split = {"tensor": 4, "data": 2, "expert": 8}

    def at(sequences, **settings):
        return step_s(made_by, sequences, **split, layout=ExpertLayout(**settings))

    zipf = Zipf(zipf=0.9)
    many = 16_384
    even, uneven = at(many, popularity="even"), at(many, popularity=zipf)
    packed = at(many, popularity=zipf, placement="eplb")
    copied = at(many, popularity=zipf, placement="eplb", redundant=32)
    assert even <= copied < packed < uneven
    # A few tokens read the weights of the experts that they wake, and popular ones are shared: less is read.
    assert at(8, popularity=zipf, placement="eplb") < at(8, popularity="even")


def test_the_roofline_reads_the_experts_that_are_woken_on_the_busiest_rank():
    load = layout(Zipf(zipf=0.9)).load(128, 8, 8)
    cost = Roofline(QWEN, H200, ParallelConfig(tensor=8, expert=8, layout=layout(Zipf(zipf=0.9))))
    even = Roofline(QWEN, H200, ParallelConfig(tensor=8, expert=8, layout=layout("even")))
    some = Totals(16, 0, 0, 0, 0, 16, 1600, 16)
    expert_bytes = 3 * 4096 * 1536 * 2
    awake = load.awake(16).max() - 128 / 8 * (1 - (1 - 8 / 128) ** 16)
    more_s = 94 * awake * expert_bytes / H200.hbm_bytes_per_s
    assert cost.iteration_s(some) - even.iteration_s(some) == pytest.approx(more_s, rel=1e-9)
    # The work of all devices counts each expert that is woken once.
    assert cost.work(some).hbm_bytes - even.work(some).hbm_bytes == pytest.approx(
        94 * expert_bytes * (load.distinct(16) - 128 * (1 - (1 - 8 / 128) ** 16)), rel=1e-9
    )
    assert cost.work(some).flops == pytest.approx(even.work(some).flops, rel=1e-12)


def test_tiles_of_the_busiest_rank_are_those_of_drawn_tokens():
    load = LOADS["zipf"]
    counts = drawn(load, 200, times=100)
    fullest = counts[np.arange(100), counts.sum(axis=-1).argmax(axis=1)]
    found = routed_by(load, [200.0])
    assert found.awake[0] == pytest.approx((fullest > 0).sum(axis=-1).mean(), rel=0.02)
    for i, rows in enumerate((8, 16, 32, 64)):
        assert found.tiles[0, i] == pytest.approx(np.ceil(fullest / rows).sum(axis=-1).mean(), rel=0.1)


def test_copies_take_memory():
    def weights(redundant):
        placed = layout("even", placement="eplb", redundant=redundant)
        return deploy(
            model=QWEN, hardware=H200, parallel=ParallelConfig(data=8, expert=8, layout=placed)
        ).weight_bytes_per_device

    assert weights(16) - weights(0) == pytest.approx(94 * 2 * 3 * 4096 * 1536 * 2)


def test_what_the_exchanges_send():
    """A token's 8 of 128 experts on 8 devices are on 5.3 of them: less than everywhere, less than a copy for each expert."""
    network = Interconnect(kind="InfiniBand", latency_s=3e-6, bytes_per_s=5e9)
    device, rows = dataclasses.replace(load_device("h200"), network=network), np.array([4096.0])

    def exchange_s(mode, devices=8, popularity="measured"):
        parallel = ParallelConfig(
            data=devices, expert=devices, layout=ExpertLayout(popularity=popularity, exchange=mode)
        )
        cost = Calibrated.for_stack("vllm")(QWEN, device, parallel)
        return float(cost.kernels.exchange_s(rows, cost._stages[0].work.exchange)[0])

    everywhere, all_to_all = exchange_s("allgather_reducescatter"), exchange_s("all_to_all")
    normal, low_latency = exchange_s("deepep_high_throughput"), exchange_s("deepep_low_latency")
    assert everywhere == exchange_s(None)
    # Of few devices all are near: a copy for each of eight experts is more than one for each of seven others.
    assert normal < everywhere < low_latency
    link = device.link.bytes_per_s
    hit = 8 * (1 - np.prod([(112 - i) / (128 - i) for i in range(8)]))
    assert all_to_all > 2 * 4096 / 8 * hit * 7 / 8 * 4096 * 2 / link
    # Over two nodes a slow network carries one copy for a node, or one for each expert there.
    sent = 4096 / 16 * 4096 * 2 / device.network.bytes_per_s
    across, across_low = (exchange_s(f"deepep_{mode}", 16) for mode in ("high_throughput", "low_latency"))
    both_nodes = 1 - np.prod([(64 - i) / (128 - i) for i in range(8)])
    # Dispatch and combine of 16-bit rows.
    assert across == pytest.approx(2 * (device.network.latency_s + sent * both_nodes), rel=1e-6)
    assert across_low == pytest.approx(2 * (device.network.latency_s + sent * 4), rel=1e-6)
    # Rows crowd on the rank with the popular experts.
    assert exchange_s("all_to_all", popularity=Zipf(zipf=1.0)) > all_to_all


@pytest.mark.parametrize(
    ("stack", "expert", "rows", "reduced"),
    [("sglang", 1, 2049, True), ("sglang", 4, 2049, True), ("sglang", 8, 2049, False), ("sglang", 1, 2048, False),
     ("vllm", 1, 2049, False)],
)  # fmt: skip
def test_sglang_sends_rows_of_prompts_by_all_reduces_where_experts_are_on_fewer_than_all_devices(
    stack, expert, rows, reduced
):
    """Graphs of 256 sequences on each of 8 ranks replay 2,048 rows."""
    parallel = ParallelConfig(data=8, expert=expert)
    cost = Calibrated.for_stack(stack)(QWEN, H200, parallel)
    exchange = cost._stages[0].work.exchange
    found = cost.kernels.exchange_s(np.array([float(rows)]), exchange)

    def collective_s(kind):
        return cost.kernels.collective_s(kind, np.array([rows * exchange.row_bytes]), 8)

    apart_s = collective_s("all_gather") + collective_s("reduce_scatter")
    assert found == pytest.approx(2 * collective_s("all_reduce") if reduced else apart_s, rel=1e-12)


def test_deepep_is_priced_as_it_was_measured():
    """128 tokens on each of eight H200, DeepSeek-V3's experts in 8 bits, low latency.

    dispatch_h200_deepep_sglang0.5.12.csv, hidden 7168, topk 8, 256 experts: 35.119 and 67.745 us.
    """
    cost = Calibrated.for_stack("sglang")(
        load_model("deepseek-v3"),
        H200,
        ParallelConfig(data=8, expert=8, layout=ExpertLayout(exchange="deepep_low_latency")),
    )
    seconds = cost.kernels.exchange_s(np.array([8 * 128.0]), cost._stages[0].work.exchange)[0]
    assert seconds == pytest.approx((35.119 + 67.745) * 1e-6, rel=0.1)


@pytest.mark.parametrize(
    ("degrees", "settings", "message"),
    [
        ({"data": 8, "expert": 8}, {"popularity": (1.0,) * 64},
         "experts.popularity has 64 weights and qwen3-235b-a22b has 128 experts; give one for each"),
        ({"data": 8, "expert": 8}, {"popularity": "even", "placement": "eplb", "redundant": 3},
         "experts.redundant 3 makes 131 experts, which do not divide over 8 ranks; it may be 0, 8, 16, ..."),
        ({"data": 8, "expert": 8}, {"placement": "eplb"},
         "experts.placement eplb goes by which experts are popular, and popularity measured does not say"),
        ({"tensor": 8}, {"popularity": "even", "placement": "eplb"},
         "experts.placement eplb needs experts on several ranks; set parallel.expert or leave it out"),
        ({"tensor": 8, "expert": 8}, {"exchange": "all_to_all"},
         r"experts.exchange all_to_all needs data-parallel attention \(parallel.data\)"),
        ({"tensor": 2, "data": 2}, {"exchange": "all_to_all"},
         "experts.exchange all_to_all sends rows to the ranks of their experts, and every device has a part of each expert"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused(degrees, settings, message):
    with pytest.raises(ValueError, match=message):
        deploy(model=QWEN, hardware=H200, parallel=ParallelConfig(**degrees, layout=ExpertLayout(**settings)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"popularity": "skewed"}, "popularity is measured, even, a Zipf or a weight for each expert; got 'skewed'"),
        ({"popularity": (0.0, 0.0)}, "popularity has a weight of at least 0 for each expert, not all of them 0"),
        ({"placement": "random"}, "placement of experts is linear, round_robin, eplb; got 'random'"),
        ({"popularity": "even", "redundant": 2}, "copies of experts are made by placement eplb alone"),
        ({"exchange": "nccl"}, "the exchange with experts is allgather_reducescatter, all_to_all"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ExpertLayout(**settings)


def test_dense_models_and_pcie_are_refused():
    with pytest.raises(ValueError, match=r"experts is about a mixture of experts, and llama-3.1-8b is dense"):
        deploy(model="llama-3.1-8b", hardware=H200, parallel=ParallelConfig(layout=layout("even")))
    with pytest.raises(ValueError, match="DeepEP needs NVLink, and devices of l40s are joined by PCIe"):
        deploy(
            model=load_model("qwen3-30b-a3b"),
            hardware="l40s",
            parallel=ParallelConfig(data=4, expert=4, layout=ExpertLayout(exchange="deepep_low_latency")),
            cost=Calibrated.for_stack("vllm"),
        )


def test_a_popularity_file(tmp_path):
    file = tmp_path / "popularity.txt"
    file.write_text("# tokens of each expert\n3\n\n1.5\n")
    assert read_popularity(file) == (3.0, 1.5)
    file.write_text("3\nmany\n")
    with pytest.raises(ValueError, match="line 2: expected a number of at least 0, got 'many'"):
        read_popularity(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_popularity(tmp_path / "none.txt")


def _with(backend, *, model="gpt-oss-120b", hardware="b200", stack="vllm", **how):
    layout = ExpertLayout(backend=backend)
    parallel = ParallelConfig(tensor=1, layout=layout)
    return deploy(model=model, hardware=hardware, parallel=parallel, cost=Calibrated.for_stack(stack), **how)


def test_a_backend_that_was_timed_prices_experts():
    decode = Totals(64, 0, 0, 0, 0, 64, 64 * 1000, 64, 0, 64 * 128)
    times = {
        backend: _with(backend).cost.iteration_s(decode)
        for backend in (None, "flashinfer_trtllm_mxfp8", "flashinfer_trtllm_bf16")
    }
    assert times["flashinfer_trtllm_mxfp8"] == times[None]
    assert times["flashinfer_trtllm_bf16"] != times[None]
    cost, found = Calibrated.for_stack("vllm"), _with("flashinfer_trtllm_bf16")
    variants = {use.kernel.variant for use in cost._gpu(found.device).uses([], found.cost.work_by_stage)}
    assert "mxfp4/vllm" in variants


def test_a_backend_that_was_not_timed_is_said():
    cost, found = Calibrated.for_stack("vllm"), _with("marlin")
    said = cost.stand_ins(found.model, found.device, found.cost.work_by_stage)
    assert "b200: experts in mxfp4 run by marlin were not timed under vllm; those that were stand in." in said
    plain = _with(None)
    assert not any("run by" in each for each in cost.stand_ins(plain.model, plain.device, plain.cost.work_by_stage))
    assert found.cost.iteration_s(Totals(1, decode_seqs=1, decode_kv_tokens=9)) == plain.cost.iteration_s(
        Totals(1, decode_seqs=1, decode_kv_tokens=9)
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "vllm has no backend 'fastest' for experts in mxfp4; it has flashinfer_trtllm_bf16, "),
        (
            {"stack": "sglang"},
            "sglang has no backend 'fastest' for experts in mxfp4; none are known; leave experts.backend out",
        ),
    ],
)
def test_a_backend_that_the_engine_does_not_have_is_refused(how, said):
    with pytest.raises(ValueError, match=said):
        _ = _with("fastest", **how).cost


def test_names_of_backends_that_were_timed_are_those_of_parameter_sets():
    from hwmodels.profiles import load_profile
    from hwmodels.stacks.vllm import STACK

    backends = STACK.kernels.expert_backends
    for (generation, weights), names in backends.timed.items():
        device = backends.generations[generation][0]
        known, timed = backends.of(weights, device)
        assert set(names) <= set(known)
        for name in timed.values():
            assert load_profile(device).kernel("moe", [f"{name}/vllm"]) is not None
