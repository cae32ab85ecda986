"""Measured runs of a served model beside their simulation, nothing fitted: what `rooftrace bench compare` prints, arm by arm.

    python -m benchmarks.served_run [../shared/serving/inference_perf_h100_llama3-8b.csv]

Llama-3.1-8B on one H100 behind vLLM 0.11.0, measured by inference-perf (commit 7de5ef2 of kubernetes-sigs/inference-perf,
Apache-2.0): seven rates of 60 s for each arm, 100 prompts of 204 tokens in ten groups, 64 output tokens. The client holds at most
440 requests in flight. A burst before the first stage has sent all prompts; only `chunk_prefix` caches them. The
newest terms of vLLM price the server, and with --release those fitted to another release.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sim.bench.compare import HEADLINES, compared, headline, load_text, saturation_text
from sim.bench.facts import all_with_facts, divided
from sim.bench.reading import read_files
from sim.scenario import Scenario

SCENARIO = Path(__file__).parents[1] / "examples" / "bench" / "served-h100.yaml"
FACTS = (
    "run.prompt_tokens=204",
    "run.output_tokens=64",
    "run.concurrency=440",
    "run.burstiness=1",
    "run.fills_time=true",
)
ARMS = {
    "plain": (),
    "batch192": ("scheduler.max_num_seqs=192",),
    "chunk_prefix": (
        "scheduler.enable_chunked_prefill=true",
        "memory.prefix_caching=true",
        "run.shared={groups: 10, prompts_per_group: 10, prefix_tokens: 128, warm: true}",
    ),
}


def main() -> None:
    """Print a table of each arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="../shared/serving/inference_perf_h100_llama3-8b.csv")
    parser.add_argument("--release", help="serving_release, whose terms price the server")
    asked = parser.parse_args()
    runs = read_files([asked.file]).runs
    release = (f"serving_release='{asked.release}'",) if asked.release else ()
    for arm, own in ARMS.items():
        settings, facts = divided((*FACTS, *own, *release))
        scenario = Scenario.load(SCENARIO).with_set(*settings)
        found = compared(scenario, all_with_facts([run for run in runs if run.config["arm"] == arm], facts))
        print(arm)
        for each in found.replays:
            cells = []
            for quantity in HEADLINES:
                _, theirs, ours, error = headline(each, quantity)
                scale = 1.0 if quantity == "output_tokens_per_s" else 1e3
                cells.append(
                    f"{quantity[:6]} {(theirs or 0) * scale:9.2f} {(ours or 0) * scale:9.2f} {error or 0:+8.1%}"
                )
            print(f"  {load_text(each.run):16}{'   '.join(cells)}  {saturation_text(each)}")
        for saturated, where in ((False, "below"), (True, "beyond")):
            for name, of in found.errors(saturated=saturated).items():
                print(
                    f"  {where} saturation, {name}: mean {of.mean:.1%}, median {of.median:.1%}, farthest {of.worst:+.1%}"
                )


if __name__ == "__main__":
    main()
