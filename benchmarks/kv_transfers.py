"""Measured transfers of KV from machine to machine, beside a fixed cost and bytes over bandwidth.

Bytes are the deployments' own: what each rank of the receiver keeps of the prompt, all ranks sending at once over the adapters of
the node. The two terms of a connector are fitted to its rows (least squares of relative errors); of each row the error is that of a
fit to the other rows alone.

    python benchmarks/kv_transfers.py [--file kv_transfer_mooncake.csv]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import median

from hwmodels.transfers import fitted, seconds, transfer_terms
from sim.scenario import Scenario
from sim.scenario.assembly import deployment_of

LINE_BYTES_PER_S = 200e9
"""The bandwidth of either node: 8 x 200 Gbit/s and 4 x 400 Gbit/s."""

# Bytes do not depend on the device, which the catalogue does not have (H800, H20).
CASES = {
    "vllm_qwen3_8b_tp8_h800": ("mooncake_vllm", {"model": "qwen3-8b", "parallel": {"tensor": 8}}),
    "sglang_qwen3_235b_tp8_h20": (
        "mooncake_sglang",
        {"model": "qwen3-235b-a22b", "parallel": {"tensor": 8}, "serving_stack": "sglang"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("../shared/serving/kv_transfer_mooncake.csv"))
    with parser.parse_args().file.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    errors: list[float] = []
    print("case                        tokens   MB a rank   ranks   measured ms   left out ms   error")
    for case, (connector, settings) in CASES.items():
        deployment = deployment_of(Scenario(**settings))
        ranks = deployment.parallel.tensor
        mine = [row for row in rows if row["case"] == case]
        sizes = [int(row["prompt_tokens"]) * deployment.kv_bytes_per_token_per_device * ranks for row in mine]
        times = [float(row["transfer_ms"]) / 1e3 for row in mine]
        for i, row in enumerate(mine):
            others = [j for j in range(len(mine)) if j != i]
            terms = fitted([sizes[j] for j in others], [times[j] for j in others], LINE_BYTES_PER_S)
            predicted = seconds(terms, sizes[i], LINE_BYTES_PER_S)
            error = predicted / times[i] - 1
            errors.append(abs(error))
            print(
                f"{case:<26} {row['prompt_tokens']:>7} {sizes[i] / ranks / 1e6:>11.1f} {ranks:>7} {times[i] * 1e3:>13.2f} "
                f"{predicted * 1e3:>13.2f} {error:>+7.1%}"
            )
        terms, kept = fitted(sizes, times, LINE_BYTES_PER_S), transfer_terms(connector)
        print(
            f"{connector}: fixed_s {terms.fixed_s:.3g}, share {terms.share:.3g} of the line rate"
            f" (transfers.toml: {kept.fixed_s:.3g}, {kept.share:.3g})"
        )
    print(
        f"median error, each row left out in turn: {median(errors):.1%} over {len(errors)} rows; largest {max(errors):.1%}"
    )


if __name__ == "__main__":
    main()
