"""Runs of users with sessions beside their simulation."""

import csv
import itertools
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from hwmodels.measured import read
from sim.bench.published.machines import Unmodelled
from sim.bench.published.sessions import replayed, session_runs
from sim.cli import build_app
from sim.validation.sessions import collapse, sessions

NAME = "agentic_b200_dsr1-fp4_vllm0.19.1"
RUN = {"run": "a", "tp": 8, "users": 2, "kv_offload": "off", "clean": "yes", "duration_s": 400, "requests_ok": 4,
       "ttft_p50_ms": 500, "itl_p50_ms": 9, "output_len_mean": "", "prefix_hit_rate": 0.9, "cpu_prefix_hit_rate": "",
       "kv_tokens": 3_000_000, "kv_use_mean": 0.02}  # fmt: skip
BLOCK = 32


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def recorded(rng, users, requests):
    """Requests of users whose prompts grow and now and then lose their end; what each kept is in client_hit_blocks of 64."""
    rows = []
    for user in range(users):
        prompt = int(rng.integers(3000, 9000))
        for index in range(requests):
            kept = 0
            if index:
                kept = prompt if rng.random() < 0.7 else int(rng.integers(0, prompt))
                prompt = kept + int(rng.integers(1, 3000))
            rows.append({"run": "a", "user": f"u{user}", "request_idx": 5 + index, "trace_id": f"t{user}",
                         "start_s": 30 * index + user, "input_tokens": prompt, "output_tokens": int(rng.integers(2, 60)),
                         "e2e_ms": 20_000, "client_hit_blocks": kept // 64, "ok": True})  # fmt: skip
    return rows


def tables(folder, rows, **changed):
    firsts = [row for row in rows if row["request_idx"] == 5]
    write(folder / f"{NAME}.csv", [RUN | changed])
    write(folder / f"{NAME}_requests.csv", rows)
    write(folder / f"{NAME}_series.csv",
          [{"run": "a", "t_s": t, "running": 1, "waiting": 0, "kv_use": 0.02} for t in (0, 100, 400)])  # fmt: skip
    write(folder / f"{NAME}_users.csv",
          [{"run": "a", "user": row["user"], "start_s": row["start_s"], "trace_id": row["trace_id"], "first_request": 5,
            "requests_left": sum(other["user"] == row["user"] for other in rows), "first_input_tokens": row["input_tokens"]}
           for row in firsts])  # fmt: skip
    return [read(path) for path in sorted(folder.glob("*.csv"))]


def run_of(found):
    (run,) = session_runs(next(table for table in found if table.kind == "e2e_agentic"), found)
    return run


@pytest.mark.parametrize("seed", range(4))
def test_a_large_cache_finds_of_every_prompt_what_it_kept_of_the_one_before(tmp_path, seed):
    rows = recorded(np.random.default_rng(seed), users=3, requests=6)
    seen, _ = replayed(run_of(tables(tmp_path, rows)))
    kept = 0
    for before, row in itertools.pairwise(rows):
        if row["user"] == before["user"]:
            # Blocks are found whole, and of a prompt that is all cached one is computed again.
            common = min(row["client_hit_blocks"] * 64, before["input_tokens"])
            kept += min(common // BLOCK, (row["input_tokens"] - 1) // BLOCK) * BLOCK
    assert seen.found == pytest.approx(kept / sum(row["input_tokens"] for row in rows))
    assert seen.hit == seen.found  # nothing waited for memory
    assert seen.requests == len(rows)


def test_looks_at_a_request_that_does_not_fit_count_again(tmp_path):
    rows = recorded(np.random.default_rng(1), users=4, requests=4)
    for row in rows:
        row["output_tokens"] = 400
    seen, _ = replayed(run_of(tables(tmp_path, rows, kv_tokens=20_000)))
    # Who waits finds nothing at the head of the queue, and all that is looked up then counts below the line.
    assert seen.hit < seen.found / 2


def test_kv_in_use_over_time_is_that_of_the_users_under_way(tmp_path):
    rows = recorded(np.random.default_rng(1), users=1, requests=2)
    rows[0]["output_tokens"], rows[1]["output_tokens"] = 20_000, 2
    _, kv = replayed(run_of(tables(tmp_path, rows, kv_tokens=64_000)))
    # One request holds its prompt, and a token more with each step, of 4 to 15 ms.
    assert kv.t_s == (100.0, 400.0)
    grown = kv.simulated[0] * 64_000 - rows[0]["input_tokens"]
    assert 100 / 0.015 < grown < 100 / 0.004
    assert kv.apart == pytest.approx(np.mean([abs(0.02 - each) for each in kv.simulated]))


def test_requests_that_no_table_has_are_drawn_from_those_recorded(tmp_path):
    rows = recorded(np.random.default_rng(2), users=3, requests=6)
    found = tables(tmp_path, rows)
    write(tmp_path / f"{NAME}_users.csv", [
        {"run": "a", "user": "x", "start_s": 0, "trace_id": "other", "first_request": 0, "requests_left": 8,
         "first_input_tokens": 4000}
    ])  # fmt: skip
    found = [read(path) for path in sorted(tmp_path.glob("*.csv"))]
    workload = run_of(found).workload
    assert len(workload) == 8
    assert set(workload.output_tokens.tolist()) <= {row["output_tokens"] for row in rows}
    assert workload.prompt_tokens.max() <= 128_000


@pytest.mark.parametrize("kind", ["requests", "users", "series"])
def test_a_table_that_is_missing_is_named(tmp_path, kind):
    tables(tmp_path, recorded(np.random.default_rng(0), 2, 2))
    (tmp_path / f"{NAME}_{kind}.csv").unlink()
    found = [read(path) for path in sorted(tmp_path.glob("*.csv"))]
    with pytest.raises(Unmodelled, match=f"a table of kind e2e_agentic_{kind}"):
        run_of(found)
    assert f"{NAME}.csv" in sessions(found).unmodelled


def test_validate_prints_sessions_and_the_page_has_a_section(tmp_path):
    folder = tmp_path / "measured"
    folder.mkdir()
    tables(folder, recorded(np.random.default_rng(0), 2, 3))
    asked = ["validate", "--measured", str(folder), "--markdown", str(tmp_path / "page.md"), "--plots", str(tmp_path)]
    got = CliRunner().invoke(build_app(), asked)
    assert got.exit_code == 0, got.output
    assert "of 1 clean runs" in got.output
    assert "## Sessions" in (tmp_path / "page.md").read_text()
    assert (tmp_path / f"sessions_{NAME}.png").stat().st_size > 10_000


def conversations(folder, turns):
    rows = []
    for number, n in enumerate(turns):
        prompt = 100 + number
        for turn in range(n):
            rows.append({"conversation": number, "turn": turn + 1, "prompt_tokens": prompt, "output_tokens": 40})
            prompt += 40 + 17
    write(folder / "multiturn_b200_llama3.3-70b-fp4_conversations.csv", rows)
    return rows


def test_clients_take_conversations_one_after_the_other(tmp_path):
    rows = conversations(tmp_path, [3, 1, 4, 2, 5, 1, 2])
    write(tmp_path / "multiturn_b200_llama3.3-70b-fp4_vllm0.15.csv", [
        {"tp": 1, "clients": 3, "kv_offload": "off", "requests": len(rows) + 6, "kv_tokens": 200_000, "ttft_p50_ms": 90,
         "tpot_p50_ms": 9, "gpu_hit_rate": 0.6, "cpu_hit_rate": "", "kv_use_max": 0.01}
    ])  # fmt: skip
    found = [read(path) for path in sorted(tmp_path.glob("*.csv"))]
    (run,) = session_runs(next(table for table in found if table.kind == "e2e_multiturn"), found)
    seen, _ = replayed(run)
    assert seen.requests == len(rows) + 6  # conversations come again where there are too few
    # Full blocks of all that was said before, the answer with it but for its last token, which nobody has computed.
    per_turn = [(row["prompt_tokens"] - 17 - 1) // 16 * 16 if row["turn"] > 1 else 0 for row in [*rows, *rows[:6]]]
    assert seen.found == pytest.approx(sum(per_turn) / run.workload.prompt_tokens.sum())
    clients = run.workload.clients()
    sent = [row for start in clients.starts_ns for row, _ in clients.start(start)]
    in_flight, order = list(sent), list(sent)
    while in_flight:
        ended = in_flight.pop(0)
        new = [row for row, _ in clients.ended(ended, 0)]
        assert len(new) <= 1
        in_flight += new
        order += new
    assert sorted(order) == list(range(len(run.workload)))
    session = run.workload.session
    places = {row: place for place, row in enumerate(order)}
    assert all(places[row] < places[row + 1] for row in range(len(session) - 1) if session[row] == session[row + 1])


@pytest.mark.parametrize(
    ("rates", "users"),
    [
        ([(2, 0.9), (8, 0.8), (16, 0.2), (32, 0.0)], 16),
        ([(32, 0.0), (16, 0.5), (2, 0.9)], 32),
        ([(2, 0.9), (4, 0.1), (8, 0.8)], None),
        ([(2, 0.9)], None),
        ([], None),
    ],
)
def test_a_hit_rate_collapses_where_it_stays_below_half_of_its_best(rates, users):
    assert collapse(rates) == users


@pytest.mark.slow(reason="whole tables of measurements")
def test_hit_rates_collapse_and_host_memory_takes_over_where_it_was_measured(shared):
    folder = shared / "measured3"
    found = [read(path) for path in sorted([*folder.glob("agentic_*.csv"), *folder.glob("multiturn_*.csv")])]
    runs = [run for run in sessions(found).runs if run.clean]
    assert len(runs) == 30
    agentic = [run for run in runs if run.file.startswith("agentic")]
    assert sum(run.hit_apart <= 0.06 for run in agentic) >= len(agentic) - 1
    assert np.median([run.hit_apart for run in runs]) < 0.03
    for run in agentic:
        if math.isfinite(run.measured.host_hit) and run.tensor == 4 and run.users <= 64:
            assert abs(run.measured.host_hit - run.simulated.host_hit) < 0.15, run.name
