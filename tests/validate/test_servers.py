"""Settings of the servers of published rows: which line of the table is a row's, and what it makes of a scheduler."""

from __future__ import annotations

import pytest

from hwmodels.device import load_device
from hwmodels.measured import read
from policies.routers import Random, RoundRobin, TrtLlmRanks
from policies.sglang import Sglang
from policies.trtllm import TrtLlm
from policies.vllm import Vllm
from policies.wrappers import Cap
from sim.bench.published.rows import experiment_of, protocol_of, rows_of, served_run, served_s
from sim.bench.published.servers import EXACT, SETTINGS, ServerSettings, settings_of

TOLD = ("script", "warmup_per_client", "token_budget", "max_prefill_tokens", "max_sequences", "cuda_graph_batch",
        "receive_interval", "stream_interval", "wait_iterations", "wait_tokens_share", "kv_dtype", "prefix_cache",
        "memory_fraction")  # fmt: skip
ROW = {
    "model_path": "deepseek-ai/DeepSeek-V3", "system": "b200_sxm", "backend": "sglang", "backend_version": "0.5.9",
    "precision": "fp4", "isl": 1024.0, "osl": 1024.0, "concurrency": 16.0, "tp_size": 8.0, "attention_dp_size": 1.0,
    "moe_tp_size": 1.0, "moe_ep_size": 8.0, "measured": "2026-03-01", "provenance": "db-dump",
    "gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4", "mode": "agg", "pp_size": 1.0, "batch_size": 16.0,
}  # fmt: skip
LINE = "a.sh,2,32768,16384,128,128,30,10,,,fp8,False,0.85"


def table(folder, *lines):
    """A settings table with *lines* of (changes of the row, what was told)."""
    rows = [",".join((*EXACT, *TOLD))]
    for changes, told in lines:
        key = {**ROW, "speculation": "none", **changes}
        rows.append(
            ",".join(f"{key[name]:g}" if isinstance(key[name], float) else str(key[name]) for name in EXACT)
            + ","
            + told
        )
    (folder / SETTINGS).write_text("\n".join(rows) + "\n")
    return folder


def test_a_row_has_the_settings_of_its_own_script(tmp_path):
    folder = table(tmp_path, ({"concurrency": 8.0}, LINE.replace(",30,", ",10,")), ({}, LINE))
    found = settings_of(ROW, folder)
    assert found == ServerSettings(
        known_from="script",
        token_budget=32768,
        max_prefill_tokens=16384,
        max_sequences=128,
        graph_sequences=128,
        receive_interval=30,
        stream_interval=10,
        kv_precision="fp8",
        memory_share=0.85,
    )
    assert settings_of({**ROW, "concurrency": 8.0}, folder).receive_interval == 10


def test_a_script_with_speculation_is_none_of_a_row_without(tmp_path):
    folder = table(tmp_path, ({"speculation": "mtp"}, LINE))
    assert settings_of(ROW, folder).known_from == "defaults"
    assert settings_of({**ROW, "speculation": "mtp"}, folder).known_from == "script"


def test_a_row_without_a_script_takes_one_of_another_day_and_says_so(tmp_path):
    folder = table(
        tmp_path, ({"measured": "2026-02-01", "concurrency": 64.0}, LINE), ({"measured": "2026-02-02"}, LINE)
    )
    found = settings_of({**ROW, "backend_version": "nightly"}, folder)
    assert found.known_from == "script of another day"
    assert settings_of({**ROW, "precision": "fp8"}, folder).known_from == "script of another format"
    assert settings_of({**ROW, "system": "h200_sxm"}, folder).known_from == "defaults"


def test_defaults_leave_the_cache_in_the_models_format_but_for_tensorrt_llm(tmp_path):
    assert settings_of(ROW, tmp_path).kv_precision is None
    assert settings_of({**ROW, "backend": "trtllm"}, tmp_path).kv_precision == "fp8"


def test_a_generated_server_computes_one_whole_prompt_an_iteration():
    row = {**ROW, "provenance": "internal-gap-analysis", "backend": "trtllm", "backend_version": "1.0.0rc3"}
    found = settings_of(row)
    assert (found.token_budget, found.max_sequences) == (16 + 1024 + 1500, 16)
    scheduler = found.scheduler("trtllm", load_device("h100-sxm"), tensor=1, concurrency=16)
    assert scheduler == Cap(inner=TrtLlm(max_batch_size=16, max_num_tokens=2540), max_prompts=1)


@pytest.mark.parametrize(
    ("version", "mixed"), [("0.5.1", False), ("0.5.1.post3", False), ("0.5.6.post2", True), ("nightly-dev", True)]
)
def test_generated_sglang_servers_mix_prompts_with_decodes_since_a_release(version, mixed):
    row = {**ROW, "provenance": "internal-gap-analysis", "backend_version": version}
    assert settings_of(row, None).mixed_chunk is mixed


@pytest.mark.parametrize(("version", "ahead"), [("0.12.0", False), ("0.14.0", True)])
def test_vllm_plans_ahead_by_itself_since_0_14(version, ahead):
    row = {**ROW, "provenance": "internal-gap-analysis", "backend": "vllm", "backend_version": version}
    assert settings_of(row).asynchronous is ahead


def test_settings_become_those_of_the_stacks_own_scheduler():
    b200 = load_device("b200")
    told = ServerSettings(
        known_from="script", token_budget=4096, max_prefill_tokens=2048, max_sequences=64, receive_interval=30,
        wait_iterations=20, wait_tokens_share=0.9,
    )  # fmt: skip
    assert told.scheduler("sglang", b200, tensor=8, concurrency=64) == Sglang(
        chunked_prefill_size=4096,
        max_prefill_tokens=2048,
        max_running_requests=64,
        scheduler_recv_interval=30,
        ignore_eos=True,
        disable_radix_cache=True,
    )
    assert told.scheduler("trtllm", b200, tensor=8, concurrency=64) == TrtLlm(
        max_batch_size=64, max_num_tokens=4096, batch_wait_timeout_iters=20, batch_wait_max_tokens_ratio=0.9
    )
    assert told.scheduler("vllm", b200, tensor=8, concurrency=64) == Vllm(max_num_batched_tokens=4096, max_num_seqs=64)


@pytest.mark.parametrize(("stack", "ranks"), [("sglang", (Random(), RoundRobin())), ("trtllm", (TrtLlmRanks(),) * 2)])
def test_sglangs_prefill_workers_draw_the_rank_of_a_prompt(stack, ranks):
    layout = {
        "num_workers": 1.0,
        "tp_size": 1.0,
        "pp_size": 1.0,
        "attention_dp_size": 8.0,
        "moe_tp_size": 1.0,
        "moe_ep_size": 8.0,
    }
    pools = {f"{phase}_{name}": value for phase in ("prefill", "decode") for name, value in layout.items()}
    row = {**ROW, **pools, "backend": stack, "mode": "disagg", "ttft_ms": 100.0, "tpot_ms": 10.0}
    experiment, _ = experiment_of(served_run(row))
    assert tuple(machine.rank_router for machine in experiment.replicas) == ranks


def test_the_protocol_of_a_row_is_its_familys(tmp_path):
    cold = table(tmp_path, ({}, LINE.replace("a.sh,2", "a.sh,0")))
    assert protocol_of(ROW, cold).name == "inferencex-2025"
    assert protocol_of({**ROW, "backend_version": "nightly"}, cold).name == "inferencex"
    assert protocol_of({**ROW, "measured": "2025-11-05"}).name == "inferencex-2025"
    assert protocol_of({**ROW, "provenance": "internal-gap-analysis"}).name == "genai-perf"


def test_nearly_every_published_row_has_a_script(shared):
    folder = shared / "measured2"
    rows = rows_of(read(folder / "e2e_silicon_agg.csv"))
    known = [settings_of(row, folder).known_from for row in rows]
    assert {name: known.count(name) for name in set(known)} == {
        "script": 701, "script of another day": 14, "script of another format": 10, "generator": 283,
    }  # fmt: skip


def test_a_few_published_rows_end_to_end(shared):
    folder = shared / "measured2"
    rows = rows_of(read(folder / "e2e_silicon_agg.csv"))
    for label, off in (("openai/gpt-oss-120b", 0.25), ("Qwen/Qwen3-32B", 0.25)):
        row = next(
            r for r in rows if r["model_path"] == label and r["system"] == "h100_sxm" and r["concurrency"] == 8.0
        )
        found = served_s(served_run(row, folder))
        assert found.tpot_s == pytest.approx(row["tpot_ms"] * 1e-3, rel=off)
        assert found.ttft_s == pytest.approx(row["ttft_ms"] * 1e-3, rel=0.6)
