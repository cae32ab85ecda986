"""A folder with one file that holds something unknown, of whatever kind, is judged by its other files."""

from pathlib import Path

import pytest

from hwmodels.measured import is_kernel_level
from hwmodels.measured.kinds import FLAGS, KINDS, TEXT
from hwmodels.measured.parts import parts
from hwmodels.profiles import load_profile
from sim.validation.files import Folder, comparisons, read_measured

KNOWN = {
    "model": "llama3.1-8b", "model_path": "meta-llama/Llama-3.1-8B", "op": "pre", "layer": "attn", "flag": "ok",
    "kernel": "causal_conv1d_fn", "phase": "prefill", "gemm_dtype": "bf16", "query_dtype": "bf16", "kv_dtype": "bf16",
    "collective": "all_reduce", "dtype": "bf16", "backend": "vllm", "moe_dtype": "bfloat16", "mode": "normal",
    "distribution": "balanced", "hardware": "h100-sxm", "system": "h100_sxm", "backend_version": "0.11.0",
    "precision": "bf16", "gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16",
}  # fmt: skip
"""Words that the columns of text may hold."""
NAMES = (
    "{kind}_h100_2node16gpu_vidur",
    "mine",
    "{kind}_h100_vllm0.24",
    "{kind}_nocard_vllm0.24",
    "{kind}_h100_nomodel-9b_tp1_vllm0.24",
    "{kind}_prefill_h100_llama3.1-8b_tp3_fast9",
)
USUAL = ("{kind}_h100_dgx_vidur", "{kind}_prefill_h100_llama3.1-8b_tp1_vllm0.24")
NUMBERS = ("0", "-1", "nan", "1e300", "", "many", "1.5")
JUDGED = "gemm_h100_bf16_vllm0.24.csv"


def table(kind: str, **told: str) -> str:
    """Two rows of *kind*, in which the columns hold *told*, or else something that fits them."""
    _, columns, _ = KINDS[kind]
    words = {name: KNOWN.get(name, "x") if name in TEXT else "true" if name in FLAGS else "2" for name in columns}
    row = ",".join({**words, **told}[name] for name in columns)
    return f"{','.join(columns)}\n{row}\n{row}\n"


def judged_beside(folder: Path, files: dict[str, str]) -> Folder:
    """The rows read of *folder* with *files* in it, once the file that is known has been judged too."""
    (folder / JUDGED).write_text("m,n,k,latency_us\n64,4096,4096,20\n128,4096,4096,25\n")
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    found = read_measured(folder)
    lines = {each.line.file: each.line for each in comparisons(found)}
    assert lines[JUDGED].mape_pct is not None
    sheet = load_profile("h100-sxm").datasheet
    for m in found.measurements:
        if is_kernel_level(m) and m.device == "h100":
            try:
                for part in parts(m, sheet):
                    part.shape(part.columns)
            except ValueError:  # which says why there are none, and is a reason in the table
                continue
    return found


def test_names_that_say_something_unknown(tmp_path):
    judged_beside(tmp_path, {name.format(kind=kind): table(kind) for kind in KINDS for name in NAMES})


def test_columns_with_an_unknown_word(tmp_path):
    files = {
        f"{usual.format(kind=kind)}.{name}": table(kind, **{name: "unheard"})
        for kind, (_, columns, _) in KINDS.items()
        for name in columns
        for usual in USUAL
        if name in TEXT
    }
    judged_beside(tmp_path, files)


@pytest.mark.slow(reason="whole tables of measurements")
@pytest.mark.parametrize("kind", KINDS)
def test_columns_with_a_number_that_cannot_be(kind, tmp_path):
    files = {
        f"{USUAL[0].format(kind=kind)}.{name}.{at}": table(kind, **{name: value})
        for name in KINDS[kind][1]
        for at, value in enumerate(NUMBERS)
        if name not in TEXT | FLAGS
    }
    judged_beside(tmp_path, files)


def test_a_topology_that_is_not_known_is_left_out_with_the_way_out(tmp_path):
    found = judged_beside(tmp_path, {"collectives_h100_2node16gpu_vidur": table("collectives_nodes")})
    (sentence,) = found.left_out
    assert "collectives_h100_2node16gpu_vidur.csv: not understood: " in sentence
    assert "let its name also say how the devices are joined, dgx or pairwise_nvlink" in sentence


def test_formats_that_latent_attention_does_not_know_are_counted(tmp_path):
    text = table("mla_module_decode") + table("mla_module_decode", gemm_dtype="unheard").partition("\n")[2]
    found = judged_beside(tmp_path, {"mla_module_decode_h100_vllm0.24": text})
    (line,) = (each.line for each in comparisons(found) if each.file.startswith("mla"))
    assert (line.rows, dict(line.reasons)) == (4, {"gemm_dtype unheard has no kernel model": 2})
