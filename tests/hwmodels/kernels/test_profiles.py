"""Profile files: what is written is read back, and what is broken is refused with the reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hwmodels.calibrated import Calibrated
from hwmodels.device import device_catalogue, load_device
from hwmodels.gpu import GpuKernels
from hwmodels.kernels.ops import SCALARS
from hwmodels.model import load_model
from hwmodels.operations import AttentionShape, ExpertMlp
from hwmodels.overheads import serving_stack
from hwmodels.profiles import (
    borrow,
    calibrated_devices,
    complete,
    datasheet_of,
    load_profile,
    read_profile,
    write_profile,
)
from hwmodels.tpu import TpuKernels

CALIBRATED = (
    "a100-80gb-sxm", "b200", "h100-sxm", "h200", "l40s", "mi300x", "mi355x", "rtx-pro-6000", "tpu-v6e", "tpu-v7", "trainium3",
)  # fmt: skip
WITHOUT_ATTENTION = ("gaudi3", "b60", "trainium2", "trainium3")


@pytest.fixture
def text(tmp_path):
    """A profile file of two kernels, as text."""
    full = load_profile("tpu-v6e")
    path = tmp_path / "tpu.toml"
    write_profile(type(full)(name=full.name, datasheet=full.datasheet, kernels=full.kernels[:2]), path)
    return path.read_text()


def refuse(tmp_path, text, message):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_profile(path)


def test_a_written_profile_reads_back(tmp_path):
    profile = load_profile("h200")
    write_profile(profile, tmp_path / "h200.toml")
    assert read_profile(tmp_path / "h200.toml") == profile


def test_unknown_keys_are_refused_at_every_level(tmp_path, text):
    refuse(tmp_path, "colour = 1\n" + text, "colour is not a setting")
    refuse(tmp_path, text.replace("[datasheet]", "[datasheet]\nspeed = 1.0"), "datasheet: speed is not a setting")
    refuse(tmp_path, text.replace('"launch_s"', '"speed"', 1), "speed is not a parameter")
    refuse(tmp_path, text.replace("[kernel.provenance]", "[kernel.provenance]\nwho = 'me'"), "who is not a setting")


def test_numbers_that_are_none_are_refused(tmp_path, text):
    broken = text.replace("values = [", "values = [nan]\n#", 1)
    refuse(tmp_path, broken, "values must be as many numbers as \\[columns\\] has names for 'elementwise'")
    broken = re.sub(r"values = \[[^,]*", "values = [nan", text, count=1)
    refuse(tmp_path, broken, "launch_s must be a finite number; got nan")
    refuse(tmp_path, text.replace("l2_bytes = ", "l2_bytes = inf\n#", 1), "l2_bytes must be a finite number")


def test_parameters_out_of_bounds_are_refused(tmp_path, text):
    refuse(tmp_path, re.sub(r"values = \[([^,]*), [^,]*", r"values = [\1, 7.0", text, count=1), "must lie in")


def test_truncated_files_are_refused(tmp_path, text):
    refuse(tmp_path, text[: text.rindex("[[kernel]]")], "holds 1 of 2 kernels; the file is truncated")
    refuse(tmp_path, text[: text.rindex("errors_pct")], "fit_mape_pct is missing; is the file truncated")
    refuse(tmp_path, text[: len(text) // 2] + "\n[", "truncated")


def test_newer_and_unversioned_files_are_refused(tmp_path, text):
    refuse(tmp_path, text.replace("format = 1", "format = 2", 1), "update rooftrace")
    refuse(tmp_path, text.replace("format = 1\n", "", 1), "format is missing")


def test_a_variant_given_twice_is_refused(tmp_path, text):
    first, second = text.index("[[kernel]]"), text.rindex("[[kernel]]")
    refuse(tmp_path, text[:second] + text[first:second], "appears twice")


def test_a_missing_file_names_the_calibrated_devices(tmp_path):
    with pytest.raises(ValueError, match="calibrated profiles: a100-80gb-sxm"):
        read_profile(tmp_path / "none.toml")


def test_measured_devices_are_calibrated_on_the_catalogues_datasheets():
    assert calibrated_devices() == CALIBRATED
    for name in CALIBRATED:
        assert load_profile(name).datasheet == datasheet_of(load_device(name)), name


def test_shipped_profiles_keep_their_own_fits_and_say_what_is_borrowed():
    for name in CALIBRATED:
        kernels = load_profile(name).kernels
        assert any(not kernel.provenance.borrowed_from for kernel in kernels)
        assert all(kernel.provenance.borrowed_from != name for kernel in kernels)
        assert all(kernel.provenance.files for kernel in kernels)


def test_products_are_lent_by_format_and_only_where_the_device_can_multiply_them():
    l40s, b200 = load_profile("l40s"), load_profile("b200")
    own = tuple(kernel for kernel in l40s.kernels if (kernel.family, kernel.variant) == ("gemm", "bf16/vllm"))
    whole = complete(replace(l40s, kernels=own), [b200])
    lent = {kernel.variant for kernel in whole.kernels if kernel.family == "gemm"}
    # 16 bits are its own from another stack; four-bit arithmetic it has none.
    assert lent == {
        "bf16/vllm",
        *(f"{fmt}/{s}" for fmt in ("fp8", "fp8_block") for s in ("vllm", "trtllm", "sglang")),
    } - {"fp8_block/vllm"}
    experts = {kernel.variant.partition("/")[0] for kernel in whole.kernels if kernel.family == "moe"}
    assert "mxfp4" in experts
    assert "nvfp4" not in experts


def test_completing_takes_only_what_is_missing():
    l40s, h200 = load_profile("l40s"), load_profile("h200")
    bare = borrow(type(l40s)(name="l40s", datasheet=l40s.datasheet, kernels=l40s.kernels[:1]), l40s.datasheet)
    whole = complete(bare, [h200])
    assert whole.kernels[0] == bare.kernels[0]
    assert whole.find("moe", ("bf16/vllm",)) == h200.find("moe", ("bf16/vllm",))


def kernels_of(device, stack="ideal"):
    """Those of one dense layer on *device* under *stack*."""
    model = load_model("llama-3.1-8b").with_precision("fp16")
    return Calibrated.for_stack(stack)(model, load_device(device)).kernels


SHAPE = AttentionShape(kind="gqa", n_heads=32, n_kv_heads=8, qk_dim=128, v_dim=128, kv_bytes=4096.0, precision="bf16")


def test_every_device_of_a_maker_with_measured_attention_has_a_profile_that_prices_a_layer():
    for name in sorted(set(device_catalogue()) - set(WITHOUT_ATTENTION)):
        kernels = kernels_of(name)
        assert (
            0 < kernels.gemm_s(1, 4096, 4096, precision="bf16") < kernels.gemm_s(4096, 4096, 4096, precision="bf16") < 1
        )
        assert 0 < kernels.decode_form(SHAPE)(SCALARS, 8, 8, 8192) < 0.1
        assert 0 < kernels.prefill_form(SHAPE)(SCALARS, 512, 1, 131328, 512) < 0.1


def test_each_kind_of_device_has_a_class_of_kernels():
    kinds = {name: type(kernels_of(name)) for name in ("h100-sxm", "mi300x", "tpu-v6e", "tpu-v4")}
    assert kinds == {"h100-sxm": GpuKernels, "mi300x": GpuKernels, "tpu-v6e": TpuKernels, "tpu-v4": TpuKernels}
    assert {load_profile(name).kind for name in ("h200", "l40s")} == {"gpu"}
    assert load_profile("tpu-v5e").kind == "tpu"


def test_a_stack_prices_with_its_own_kernels_and_an_unmeasured_one_with_vllms():
    ideal = serving_stack("ideal")
    vllm, trtllm, sglang, eager = (
        GpuKernels(
            device=load_device("h200"), profile=load_profile("h200"), stack=replace(ideal, kernels=stack), layers=1
        ).decode_form(SHAPE)(SCALARS, 16, 16, 16 * 1024)
        for stack in ("vllm", "trtllm", "sglang", "eager")
    )
    assert len({vllm, trtllm, sglang}) == 3
    assert eager == vllm


def test_kernels_answer_for_whole_models():
    kernels = kernels_of("l40s")
    assert kernels.gemm_s(64, 4096, 4096, precision="fp8") > 0
    assert kernels.gemm_s(1, 4096, 14336, precision="int4") < kernels.gemm_s(1, 4096, 14336, precision="bf16")
    experts = ExpertMlp(name="experts", hidden=2048, ffn=768, n_experts=128, per_token=8, expert=1, precision="bf16")
    assert kernels.moe_s(64, experts) > 0
    latent = replace(SHAPE, kind="mla", n_heads=16, latent_dim=512, rope_dim=64, kv_bytes=1152.0)
    assert kernels.decode_form(latent)(SCALARS, 8, 8, 8192) > 0
    assert kernels.elementwise_s(1e6, 1) > 0
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        in_node = kernels.collective_s(kind, 1e6, 4)
        assert 0 < in_node < kernels.collective_s(kind, 1e8, 4)
    assert kernels.send_s(1e6, between_nodes=True) > 0


def test_an_absent_parameter_set_says_what_there_is():
    with pytest.raises(ValueError, match="profile tpu-v6e has no gemm parameters for bf16/vllm; it has none"):
        load_profile("tpu-v6e").get("gemm", ("bf16/vllm",))
