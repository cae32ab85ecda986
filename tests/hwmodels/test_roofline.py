"""The datasheet roofline as a CostModel: closed forms, monotonicity, and scalars equal to arrays."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.device import load_device
from hwmodels.model import load_model
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline, roof_flops_per_s
from hwmodels.row_table import EXACT_ROWS, RowTable
from hwmodels.totals import Totals
from hwmodels.work import stage_work

DEPLOYMENTS = {
    "dense": ("llama-3.1-8b", "h100-sxm", {}),
    "tensor and pipeline": ("llama-3.1-70b", "a100-80gb-sxm", {"tensor": 4, "pipeline": 2}),
    "windows and experts": ("gpt-oss-120b", "h200", {"tensor": 2}),
    "latent attention": ("deepseek-r1", "h200", {"tensor": 8}),
    "expert and data parallel": ("deepseek-v3", "h200", {"data": 8, "expert": 8}),
    "sparse attention": ("glm-5", "b200", {"tensor": 8}),
    "linear attention": ("qwen3.5-397b-a17b", "b200", {"tensor": 8}),
    "chunks": ("llama-4-maverick", "b200", {"tensor": 8}),
    "linear attention and data parallel": ("qwen3-next-80b-a3b", "h200", {"data": 4, "expert": 4}),
    "encoder": ("bert-large", "v100-16", {}),
}
COSTS = {
    name: Roofline(load_model(model), load_device(device), ParallelConfig(**degrees))
    for name, (model, device, degrees) in DEPLOYMENTS.items()
}


@st.composite
def totals(draw):
    """Sums over a batch of random chunks and decodes, as an engine makes them."""
    window = 128
    chunks = draw(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 20000)), max_size=4))
    contexts = draw(st.lists(st.integers(1, 30000), max_size=6))
    queries = draw(st.integers(1, 8))
    if not chunks and not contexts:
        contexts = [1]
    prompt = sum(q for q, _ in chunks)
    kv = [c + queries for c in contexts]
    return Totals(
        rows=prompt + queries * len(contexts),
        prefill_rows=prompt,
        prefill_chunks=len(chunks),
        prefill_pairs=sum(q * past + q * (q + 1) // 2 for q, past in chunks),
        prefill_kv_tokens=sum(q + past for q, past in chunks),
        decode_seqs=len(contexts),
        decode_kv_tokens=sum(kv),
        logit_rows=queries * len(contexts) + len(chunks),
        prefill_pairs_window=sum(min(q, window) * q for q, _ in chunks),
        decode_kv_window=sum(min(k, window) for k in kv),
    )


def assert_scalars_and_arrays_agree(cost, batch):
    arrays = Totals(*(np.array(column, dtype=np.int64) for column in zip(*batch, strict=True)))
    for stage in range(cost.n_stages):
        together = cost.iteration_s(arrays, stage)
        one_by_one = [cost.iteration_s(t, stage) for t in batch]
        assert all(type(x) is float for x in one_by_one)
        assert together.dtype == np.float64
        assert together.tolist() == one_by_one
    assert [cost.scalar_s(t) for t in batch] == [cost.iteration_s(t) for t in batch]
    assert cost.handover_s(arrays.rows).tolist() == [cost.handover_s(t.rows) for t in batch]


@pytest.mark.parametrize("name", COSTS)
@settings(max_examples=25, deadline=None)
@given(batch=st.lists(totals(), min_size=1, max_size=8))
def test_scalars_and_arrays_agree_bit_for_bit(name, batch):
    assert_scalars_and_arrays_agree(COSTS[name], batch)


_OF_A_TOKEN = ("rows", "prefill_rows", "prefill_pairs", "prefill_kv_tokens", "prefill_pairs_window", "logit_rows")


def assert_time_does_not_fall(cost, base, field, more, *, rel):
    """A total that grows, with what grows with it, makes no stage faster (*rel* for rounding)."""
    grown = base._replace(**{field: getattr(base, field) + more})
    # Totals are not independent: sequences come with rows, prompt rows with rows, KV tokens and pairs of their own.
    if (
        field == "prefill_chunks"
    ):  # of a token each: the same tokens in more chunks are another batch, and not a larger one
        grown = grown._replace(**{name: getattr(base, name) + more for name in _OF_A_TOKEN})
    if field == "decode_seqs":
        grown = grown._replace(rows=base.rows + more * (base.rows - base.prefill_rows + 1))
    if field == "prefill_rows":
        grown = grown._replace(
            rows=base.rows + more,
            prefill_kv_tokens=base.prefill_kv_tokens + more,
            prefill_pairs=base.prefill_pairs + more * base.prefill_rows + more * (more + 1) // 2,
        )
    for stage in range(cost.n_stages):
        before, after = cost.iteration_s(base, stage), cost.iteration_s(grown, stage)
        assert 0 < before < 1e6
        assert after >= before * (1 - rel)


@pytest.mark.parametrize("name", COSTS)
@settings(max_examples=25, deadline=None)
@given(base=totals(), field=st.sampled_from(Totals._fields), more=st.integers(1, 5000))
def test_times_are_positive_finite_and_do_not_fall_when_a_total_grows(name, base, field, more):
    assert_time_does_not_fall(COSTS[name], base, field, more, rel=1e-14)


@pytest.mark.parametrize(("model", "context"), [("llama-3.1-8b", 1), ("llama-3.1-8b", 100_000), ("llama-2-7b", 2000)])
def test_decode_of_one_is_weights_plus_cache_over_bandwidth(model, context):
    spec, device = load_model(model), load_device("h100-sxm")
    cost = Roofline(spec, device)
    # Weights read: every matrix, so all parameters but norms and the embedding table, of which one row is looked up.
    # Activations stay on the chip by the counting rules, and the new token's cache entry is among the KV tokens.
    matrices = spec.params - spec.embedding_params - (2 * spec.n_layers + 1) * spec.hidden
    expected = (2 * matrices + context * spec.kv_bytes_per_token()) / device.hbm_bytes_per_s
    found = cost.iteration_s(Totals(1, 0, 0, 0, 0, 1, context, 1))
    assert found == pytest.approx(expected, rel=1e-14)


def test_verified_tokens_share_one_reading_of_the_cache():
    spec, device = load_model("llama-3.1-8b"), load_device("h100-sxm")
    cost = Roofline(spec, device)
    long, short = (cost.iteration_s(Totals(5, 0, 0, 0, 0, 1, context, 5)) for context in (100_000, 20_000))
    assert long - short == pytest.approx(80_000 * spec.kv_bytes_per_token() / device.hbm_bytes_per_s, rel=1e-9)


def test_ridge_point_is_where_compute_and_bandwidth_meet():
    device = load_device("h100-sxm")
    cost = Roofline(load_model("llama-3.1-8b"), device)
    # Two bytes a weight and two FLOPs a weight and row: the ridge in rows is the ridge in FLOPs per byte, 295.3.
    ridge = device.peak("bf16") / device.hbm_bytes_per_s
    below, at, above = int(ridge), int(ridge) + 1, int(ridge) + 2

    def linear_s(rows):
        return cost.iteration_s(Totals(rows))

    assert linear_s(1) == linear_s(below)
    assert linear_s(at) > linear_s(below)
    assert linear_s(above) - linear_s(at) == pytest.approx(linear_s(1000) - linear_s(999), rel=1e-9)
    assert linear_s(10 * above) == pytest.approx(10 * linear_s(above), rel=1e-12)


def test_tensor_parallel_time_is_a_share_plus_two_ring_all_reduces_a_layer():
    spec, device = load_model("llama-2-7b"), load_device("a100-80gb-sxm")
    one = Roofline(spec, device).iteration_s(Totals(1, 0, 0, 0, 0, 1, 1000, 0))
    four = Roofline(spec, device, ParallelConfig(tensor=4)).iteration_s(Totals(1, 0, 0, 0, 0, 1, 1000, 0))
    # One for the embedding too; 4096 fp16 activations.
    reduces = (2 * 32 + 1) * device.link.ring_all_reduce_s(4096 * 2, 4)
    assert four == pytest.approx(one / 4 + reduces, rel=1e-12)


def test_pipeline_stages_share_the_time_and_hand_over_activations():
    spec, device = load_model("llama-2-7b"), load_device("a100-80gb-sxm")
    batch = Totals(1, 0, 0, 0, 0, 1, 1000, 1)
    two = Roofline(spec, device, ParallelConfig(pipeline=2))
    whole = Roofline(spec, device).iteration_s(batch)
    assert two.iteration_s(batch, 0) + two.iteration_s(batch, 1) == pytest.approx(whole, rel=1e-12)
    assert two.handover_s(100) == pytest.approx(1e-6 + 100 * 4096 * 2 / 300e9, rel=1e-12)
    nodes = Roofline(spec, device, ParallelConfig(tensor=8, pipeline=2))
    assert nodes.handover_s(100) == pytest.approx(5e-6 + 100 * 4096 * 2 / 25e9, rel=1e-12)


def test_efficiencies_scale_their_side_only():
    spec, device = load_model("llama-2-7b"), load_device("a100-80gb-sxm")
    full = Roofline(spec, device)
    half = Roofline(spec, device, bandwidth_efficiency=0.5)
    decode, prefill = Totals(1, 0, 0, 0, 0, 1, 1000, 1), Totals(8000)
    assert half.iteration_s(decode) == pytest.approx(2 * full.iteration_s(decode), rel=1e-12)
    assert half.iteration_s(prefill) == full.iteration_s(prefill)
    with pytest.raises(ValueError, match=r"compute_efficiency is a share in \(0, 1\]"):
        Roofline(spec, device, compute_efficiency=1.2)


def test_quantised_weights_move_fewer_bytes():
    device = load_device("h100-sxm")
    spec = load_model("llama-3.1-8b")
    batch = Totals(1, 0, 0, 0, 0, 1, 1, 0)
    times = {p: Roofline(spec.with_precision(p), device).iteration_s(batch) for p in ("bf16", "fp8", "int4")}
    assert times["bf16"] / times["fp8"] == pytest.approx(2.0, rel=1e-4)
    assert times["bf16"] / times["int4"] == pytest.approx(2 / (0.5 + 2 / 128), rel=1e-4)


def test_missing_arithmetic_is_refused():
    with pytest.raises(ValueError, match=r"v100-32 has no bf16 arithmetic.*it offers fp32, fp16"):
        Roofline(load_model("llama-3.1-8b"), load_device("v100"))
    with pytest.raises(ValueError, match="a100-80gb-sxm has no fp8 arithmetic"):
        Roofline(load_model("llama-3.1-8b").with_precision("fp8"), load_device("a100"))


def test_peaks_are_those_of_all_devices():
    cost = COSTS["tensor and pipeline"]
    assert cost.peak_flops_per_s == 8 * 312e12
    assert cost.peak_bytes_per_s == 8 * 2039e9


def test_no_batch_beats_the_peaks():
    cost = COSTS["dense"]
    for batch in (Totals(1, 0, 0, 0, 0, 1, 500, 1), Totals(2048, 2048, 1, 2048 * 2049 // 2, 2048, 0, 0, 1)):
        seconds, work = cost.iteration_s(batch), cost.work(batch)
        assert work.flops / seconds <= cost.peak_flops_per_s * (1 + 1e-12)
        assert work.hbm_bytes / seconds <= cost.peak_bytes_per_s * (1 + 1e-12)


@pytest.mark.parametrize("name", COSTS)
def test_a_cost_model_survives_pickling_and_compares_by_value(name):
    cost, batch = COSTS[name], Totals(100, 90, 1, 90 * 91 // 2, 90, 10, 500, 11)
    copy = pickle.loads(pickle.dumps(cost))
    assert copy == cost
    assert hash(copy) == hash(cost)
    assert copy.iteration_s(batch) == cost.iteration_s(batch)
    assert all(copy != other for key, other in COSTS.items() if key != name)


def test_numpy_integers_are_taken_as_ints():
    cost = COSTS["dense"]
    batch = Totals(1, 0, 0, 0, 0, 1, 500, 1)
    assert cost.iteration_s(Totals(*(np.int64(x) for x in batch))) == cost.iteration_s(batch)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3 * EXACT_ROWS), min_size=2, max_size=20))
def test_row_table_is_exact_then_linear_and_never_falls(rows):
    table = RowTable(lambda m: np.sqrt(m) + 0.5 * np.sin(m))
    rows = sorted(rows)
    values = [table.scalar(m) for m in rows]
    assert values == sorted(values)
    assert table.array(np.array(rows)).tolist() == values


def test_row_table_of_a_line_is_the_line():
    table = RowTable(lambda m: 3.0 * m)
    for m in (0, 1, 512, 513, EXACT_ROWS, EXACT_ROWS + 1, 100_000, 1_234_567):
        assert table.scalar(m) == pytest.approx(3.0 * m, rel=1e-14)


def test_row_table_refuses_negative_rows_and_bad_kernels():
    table = RowTable(lambda m: m * np.nan)
    with pytest.raises(ValueError, match="not finite"):
        table.scalar(1)
    with pytest.raises(ValueError, match="must not be negative"):
        RowTable(lambda m: m).scalar(-1)


def test_a_table_of_rows_grows_only_for_rows_that_it_lacks() -> None:
    asked: list[int] = []

    def of_rows(rows):
        asked.append(len(rows))
        return 1e-9 * rows

    table = RowTable(of_rows)
    many = np.array([5, 20_000])
    first = table.array(many)
    evaluated = sum(asked)
    for _ in range(40):
        np.testing.assert_array_equal(table.array(many), first)
    assert sum(asked) == evaluated


def test_no_operation_is_above_the_roof_and_a_large_batch_of_products_is_on_it() -> None:
    cost = COSTS["dense"]
    for rows in (1, 64, 16_384):
        batch = Totals(rows, rows, rows, 0, rows, 0, 0, 0)
        work, seconds = cost.work(batch), cost.iteration_s(batch)
        roof = roof_flops_per_s(work.flops / work.hbm_bytes, cost.peak_flops_per_s, cost.peak_bytes_per_s)
        assert work.flops / seconds <= roof * (1 + 1e-9)
    assert work.flops / seconds > 0.9 * roof


@pytest.mark.parametrize(
    ("device", "arithmetic"), [("b200", "fp8"), ("mi355x", "fp4"), ("h200", "bf16"), ("mi300x", "bf16")]
)
def test_mxfp4_is_bounded_by_the_arithmetic_that_multiplies_it(device, arithmetic):
    """Experts of MI355X reach 2,855 TFLOP/s in AITER's table, 1.13 times its peak in 16 bits."""
    sheet, experts = load_device(device), stage_work(load_model("gpt-oss-20b"), ParallelConfig(), 0).experts
    kernels = Roofline(load_model("gpt-oss-20b"), sheet).kernels
    rows = 65536.0
    flops = rows * 4 * 3 * 2 * 2880 * 2880
    assert kernels.moe_s(rows, experts) == pytest.approx(flops / sheet.peak_flops_per_s[arithmetic])
    plain = load_model("llama-3.1-8b").with_precision("mxfp4")
    assert Roofline(plain, sheet).peak_flops_per_s == sheet.peak_flops_per_s[arithmetic]
