"""One common step of the ranks of data-parallel attention: the slowest rank, and what all ranks do together."""

import numpy as np
import pytest

from hwmodels.budget import BUDGET_STEP, tokens_within
from hwmodels.calibrated import Calibrated
from hwmodels.device import load_device
from hwmodels.kernels.exchange import distinct_devices
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.totals import Totals
from tests.engine.costs import Ranked

QWEN, H200 = load_model("qwen3-235b-a22b"), load_device("h200")
FOUR = ParallelConfig(data=4, expert=4)
IDLE = Totals(0)


def decodes(sequences, kv_tokens):
    return Totals(sequences, 0, 0, 0, 0, sequences, kv_tokens, sequences)


def prompt(tokens):
    return Totals(tokens, tokens, 1, tokens * (tokens + 1) // 2, tokens, 0, 0, 1)


@pytest.fixture(scope="module")
def roofline():
    return Roofline(QWEN, H200, FOUR)


@pytest.fixture(scope="module", params=["vllm", "sglang", "eager"])
def calibrated(request):
    return Calibrated.for_stack(request.param)(QWEN, H200, FOUR)


def test_a_common_step_by_hand(roofline):
    """16-bit Qwen3-235B on four ranks: one decodes 8 sequences of 1,000 tokens, one a single one, two are idle."""
    layers, hidden, bandwidth, link = 94, 4096, H200.hbm_bytes_per_s, H200.link
    # Of one rank: 64 query and 4 key-value heads of 128, the output projection, the router, and the head of 151,936 tokens.
    weights = 2 * layers * (hidden * (64 + 2 * 4) * 128 + 64 * 128 * hidden + hidden * 128) + 2 * hidden * 151_936
    cache = 8 * 1000 * layers * 2 * 4 * 128 * 2
    rank_s = (weights + cache) / bandwidth
    # Nine tokens wake 128 (1 - (1 - 8/128)^9) experts, a quarter of them on each device; three matrices of 4096 x 1536 each.
    awake = 128 * (1 - (1 - 8 / 128) ** 9)
    experts_s = layers * awake / 4 * 3 * hidden * 1536 * 2 / bandwidth
    # On average a token goes to the devices that hold one of its eight, and comes back.
    sent = 9 / 4 * distinct_devices(4, 8, 128) * hidden * 2
    exchange_s = layers * 2 * (3 * link.latency_s + sent * 3 / 4 / link.bytes_per_s)
    step_s = roofline.common_step([decodes(8, 8000), IDLE, decodes(1, 100), IDLE])
    assert step_s == pytest.approx(rank_s + experts_s + exchange_s, rel=1e-9)


def test_even_ranks_take_what_the_replica_takes(roofline, calibrated):
    for cost in (roofline, calibrated):
        for rank, whole in (
            (decodes(16, 16 * 900), decodes(64, 64 * 900)),
            (prompt(512), Totals(2048, 2048, 4, 4 * 512 * 513 // 2, 2048, 0, 0, 4)),
        ):
            assert cost.common_step([rank] * 4) == pytest.approx(cost.iteration_s(whole), rel=1e-12)


def test_the_slowest_rank_sets_the_step(calibrated):
    even = calibrated.common_step([decodes(16, 16_000)] * 4)
    uneven = calibrated.common_step([decodes(16, 16_000)] * 3 + [decodes(16, 160_000)])
    assert uneven > 1.01 * even
    # Whichever it is.
    assert uneven == calibrated.common_step([decodes(16, 160_000)] + [decodes(16, 16_000)] * 3)


def test_ranks_wait_for_the_prompt_of_one(calibrated):
    alone = calibrated.common_step([prompt(4096), IDLE, IDLE, IDLE])
    beside = calibrated.common_step([prompt(4096), decodes(8, 8000), decodes(8, 8000), IDLE])
    assert calibrated.common_step([decodes(8, 8000)] * 4) < alone < beside < 1.1 * alone


def test_graphs_exchange_as_if_all_ranks_were_as_full(calibrated):
    one, all_four = ([decodes(64, 64_000)] + [decodes(n, n * 1000)] * 3 for n in (1, 64))
    padded = calibrated.kernels.pads_ranks
    exchange, layers = calibrated._stages[0].work.exchange, 94

    def exchange_s(rows):
        return layers * float(calibrated.kernels.exchange_s(np.array([float(rows)]), exchange)[0])

    experts = calibrated._stages[0].work.experts
    experts_s = [layers * float(calibrated.kernels.moe_s(np.array([float(n)]), experts)[0]) for n in (67, 256)]
    more = calibrated.common_step(all_four) - calibrated.common_step(one)
    sent_more = 0.0 if padded else exchange_s(256) - exchange_s(67)
    assert more == pytest.approx(experts_s[1] - experts_s[0] + sent_more, rel=1e-6)


def test_scalars_and_arrays_agree_to_the_bit(roofline, calibrated):
    steps = [
        [decodes(8, 8000), IDLE, prompt(700), decodes(3, 100)],
        [IDLE] * 4,
        [decodes(1, 30_000), decodes(64, 64_000), IDLE, IDLE],
    ]
    for cost in (roofline, calibrated):
        columns = [
            Totals(*(np.array([step[rank][i] for step in steps], np.int64) for i in range(len(Totals._fields))))
            for rank in range(4)
        ]
        assert cost.common_step(columns).tolist() == [cost.common_step(step) for step in steps]


def test_more_work_on_a_rank_takes_no_less(calibrated):
    rng = np.random.default_rng(3)
    for _ in range(50):
        ranks = [
            decodes(int(n), int(n) * int(c))
            for n, c in zip(rng.integers(0, 90, 4), rng.integers(1, 9000, 4), strict=True)
        ]
        more = list(ranks)
        which = int(rng.integers(4))
        old = ranks[which]
        more[which] = decodes(old.rows + int(rng.integers(1, 30)), old.decode_kv_tokens + int(rng.integers(100, 9000)))
        assert calibrated.common_step(more) >= calibrated.common_step(ranks)


def test_one_rank_is_an_iteration():
    cost = Roofline(QWEN, H200, ParallelConfig(tensor=4))
    assert cost.common_step([decodes(8, 8000)]) == cost.iteration_s(decodes(8, 8000))


def test_there_is_one_totals_a_rank(roofline):
    with pytest.raises(ValueError, match="a common step takes one Totals for each of 4 ranks; got 2"):
        roofline.common_step([IDLE, IDLE])


# Pipelines of ranks.

PIPELINE = ParallelConfig(data=4, expert=4, pipeline=2)
UNEVEN = [decodes(8, 8000), IDLE, prompt(700), decodes(3, 100)]


def test_the_stages_of_a_pipeline_share_what_ranks_take_together(roofline):
    """94 layers are 47 and 47, the last stage has the head; no layer is computed twice and none is left out."""
    stages = Roofline(QWEN, H200, PIPELINE)
    first, last = (stages.common_step(UNEVEN, stage) for stage in (0, 1))
    assert first + last == pytest.approx(roofline.common_step(UNEVEN), rel=1e-9)
    head_s = 2 * 4096 * 151_936 / H200.hbm_bytes_per_s
    assert last - first == pytest.approx(head_s, rel=1e-6)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "eager"])
def test_even_ranks_of_a_pipeline_take_what_the_replica_takes_on_each_stage(stack):
    cost = Calibrated.for_stack(stack)(QWEN, H200, PIPELINE)
    for stage in (0, 1):
        assert cost.common_step([decodes(16, 16 * 900)] * 4, stage) == pytest.approx(
            cost.iteration_s(decodes(64, 64 * 900), stage), rel=1e-12
        )
        columns = [Totals(*(np.array([column], np.int64) for column in totals)) for totals in UNEVEN]
        assert cost.common_step(columns, stage).tolist() == [cost.common_step(UNEVEN, stage)]


def test_ranks_hand_their_rows_over_side_by_side():
    cost = Roofline(QWEN, H200, PIPELINE)
    # 700 rows of 4096 16-bit numbers on each rank.
    assert cost.handover_s(4 * 700) == pytest.approx(
        H200.link.latency_s + 700 * 4096 * 2 / H200.link.bytes_per_s, rel=1e-9
    )


def test_a_token_budget_leaves_time_for_the_rows_of_all_ranks_to_be_handed_over():
    """A stage takes 1 ms and 1 us for each row of a rank, a hand-over 1 us for each row of four ranks: 2 ms and 6 us a row."""
    cost = Ranked(fixed_s=1e-3, row_s=1e-6, n_stages=2, transfer_row_s=1e-6)
    found = tokens_within(cost, tbt_s=10e-3, decodes=8, context_tokens=2000, ranks=4)
    assert found == 8000 // 6 // BUDGET_STEP * BUDGET_STEP
