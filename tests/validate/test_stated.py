"""Pages state the errors of served runs that the last validation found."""

import csv
from pathlib import Path

import pytest

from hwmodels.overheads import serving_stack
from sim.validation.aims import held_back
from sim.validation.choices import right_pct

ROOT = Path(__file__).resolve().parents[2]
STACKS = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang"}
POOLS, PREDICTED = "e2e_silicon_disagg.csv", "e2e_silicon_speculative_agg.csv"


def stated() -> list[tuple[str, str]]:
    """A page, and a piece of a line that it must have, without bold type."""
    held = held_back()
    with (ROOT / "docs" / "validation" / "files_served.csv").open(encoding="utf-8") as file:
        groups = {
            (row["file"], row["by"], row["group"]): (float(row["tpot_median_pct"]), float(row["ttft_median_pct"]))
            for row in csv.DictReader(file)
            if row["tpot_median_pct"]
        }

    def both(tpot: float, ttft: float) -> str:
        return f"{tpot:.0f}, {ttft:.0f}"

    deployments, models = (
        {name: held[kind]["errors"][name][1:] for name in STACKS} for kind in ("deployments", "models")
    )
    replayed = [groups["e2e_silicon_agg.csv", "stack", name] for name in STACKS]
    trtllm, sglang = (groups[POOLS, "half stack", f"held back, {name}"] for name in ("trtllm", "sglang"))
    predicted = groups[PREDICTED, "half stack", "held back, trtllm"]
    tpots = " to ".join(dict.fromkeys(f"{tpot:.0f}" for tpot, _ in (trtllm, sglang))) + " %"
    apart = f"{trtllm[1]:.0f} %"
    held_half, fitted_half = (groups[PREDICTED, "half", half] for half in ("held back", "fitted"))
    trust, managers, readme = "docs/trust.md", "docs/for_managers.md", "README.md"
    lines = [
        (trust, f"| deployments not fitted | {' | '.join(both(*deployments[name]) for name in STACKS)} |"),
        (trust, f"| whole models not fitted | {' | '.join(both(*models[name]) for name in STACKS)} |"),
        (trust, f"| all, replayed with today's kernels and terms | {' | '.join(both(*one) for one in replayed)} |"),
        (trust, f"| separate pools, not fitted | | {both(*trtllm)} | {both(*sglang)} |"),
        (trust, f"| multi-token prediction on one machine, not fitted | | {both(*predicted)} | |"),
        (readme, f"| separate pools, not fitted | TPOT {tpots}; TTFT {apart}, behind SGLang {sglang[1]:.0f} % |"),
        (managers, f"| separate prefill pools | {tpots} | {apart}; behind SGLang {sglang[1]:.0f} % |"),
        (
            "docs/pools.md",
            f"TPOT {trtllm[0]:.0f} % (TensorRT-LLM) and {sglang[0]:.0f} % (SGLang) off, TTFT {trtllm[1]:.0f} and",
        ),
        ("docs/speculation.md", "in the median TPOT {:.0f} %, TTFT {:.0f} % off".format(*held_half)),
        ("docs/speculation.md", "{:.0f} and {:.0f} % in the 48 of the half".format(*fitted_half)),
        (
            managers,
            "| vLLM, whole models that were not measured before | {:.0f} % | {:.0f} % |".format(*models["vllm"]),
        ),
    ]
    for name, title in STACKS.items():
        tpot, ttft = deployments[name]
        lines.append((readme, f"| {title}, deployments not fitted | TPOT {tpot:.0f} %, TTFT {ttft:.0f} % |"))
        lines.append((managers, f"| {title}, other deployments | {tpot:.0f} % | {ttft:.0f} % |"))
    choices = held["deployments"]["choices"]
    cases, ties, _, _ = choices["tpot_s"]
    named = [f"{right_pct(choices[name]):.0f}" for name in ("tpot_s", "throughput", "ttft_s")]
    lines.append(
        (trust, f"named by TPOT in {named[0]} %, by throughput in {named[1]} % and by TTFT in {named[2]} % of")
    )
    lines.append((managers, f"Of two stacks, the faster one was named in {named[0]} % of {cases - ties} pairs"))
    return lines


@pytest.mark.parametrize(("page", "line"), stated())
def test_pages_state_what_the_last_validation_found(page, line):
    assert line in (ROOT / page).read_text(encoding="utf-8").replace("**", "")


@pytest.mark.parametrize("stack", STACKS)
def test_stacks_state_the_errors_that_the_page_sums_up(stack):
    for kind, title in (("deployments", "Deployments"), ("models", "Whole models")):
        _, tpot, ttft = held_back()[kind]["errors"][stack]
        said = serving_stack(stack).held_back.partition(f"{title} held back: TPOT median ")[2]
        assert float(said.split(" %")[0]) == pytest.approx(tpot, abs=0.06)
        assert float(said.partition("TTFT ")[2].split(" %")[0]) == pytest.approx(ttft, abs=0.06)
