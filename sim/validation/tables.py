"""The tables that a validation leaves: as CSV, and as the page docs/validation.md."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from hwmodels import memory_logs
from hwmodels.overheads import serving_stacks
from hwmodels.profiles import calibrated_devices, load_profile
from sim.errors import OutputError
from sim.validation.files import Comparison, ErrorLine
from sim.validation.served import served_markdown
from workloads.write import open_whole

COLUMNS = ("file", "device", "rows", "unmodelled", "mape_pct", "median_pct", "p90_pct", "bias_pct", "quantity")


def write_csv(lines: Sequence[ErrorLine], path: str | Path) -> None:
    """Write one row a line with the columns of `COLUMNS`; errors that do not exist stay empty."""
    try:
        with open_whole(path) as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for line in lines:
                values = [getattr(line, name) for name in COLUMNS]
                writer.writerow(["" if v is None else f"{v:.2f}" if isinstance(v, float) else v for v in values])
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


def to_markdown(
    lines: Sequence[ErrorLine],
    left_out: Sequence[str] = (),
    sections: Sequence[str] = (),
    served: Sequence[Comparison] = (),
) -> str:
    """The page docs/validation.md: a table of the lines, what is not modelled or was *left_out* and why, and what comparisons of
    *served* runs say by family, stack, model and load.

    Further *sections* follow the errors on data that was not fitted.
    """
    parts = [_HEAD]
    parts.append("| file | quantity | priced as | rows | unmodelled | MAPE % | median % | p90 % | bias % |")
    parts.append("| --- | --- | --- | --: | --: | --: | --: | --: | --: |")
    for line in lines:
        errors = (line.mape_pct, line.median_pct, line.p90_pct, line.bias_pct)
        cells = " | ".join("-" if value is None else f"{value:.1f}" for value in errors)
        parts.append(
            f"| {line.file} | {line.quantity} | {line.device} | {line.rows:,} | {line.unmodelled:,} | {cells} |"
        )
    parts.append("\n## Rows without a prediction\n")
    said = {(line.file, reason): count for line in lines for reason, count in line.reasons.items()}
    parts += [f"* `{file}`: {count:,}, {reason}" for (file, reason), count in said.items()]
    if left_out:
        parts.append("\n## Files and rows that were not understood\n")
        parts += [f"* {sentence}" for sentence in left_out]
    parts.append("\n## Errors on data that was not fitted\n")
    parts.append(_NAMES)
    parts.append(_held_back())
    parts += [f"\n{section}" for section in sections]
    parts.append("\n## KV blocks of engines' logs\n")
    parts.append(memory_logs.markdown())
    parts.append("\n## Serving\n")
    parts.append(served_markdown(served))
    return "\n".join(parts) + "\n"


_HEAD = """\
# Validation

Written by `rooftrace validate --measured DIR --markdown docs/validation.md`. Errors are relative, in percent; bias is the
mean of predicted / measured - 1. The first table compares the shipped profiles with all rows of the public measurements,
which include those that the profiles were fitted to; the next holds the errors on shapes that the scored fit did not see,
as the profiles state them, and the one after it the KV blocks of engines' logs. The last part takes serving runs apart.
"""

_NAMES = """\
Sets are named by format and software; [the other names](hardware.md#names-of-parameter-sets) and [what remains unexplained
of kernels](hardware.md#what-kernel-tables-remain-unexplained-and-by-how-much) are in hardware.md.
"""


def _held_back() -> str:
    rows = ["| device | kernel | measured with | points | fit MAPE % | held-back MAPE % | median % | p90 % |",
            "| --- | --- | --- | --: | --: | --: | --: | --: |"]  # fmt: skip
    for name in calibrated_devices():
        for kernel in load_profile(name).kernels:
            p = kernel.provenance
            if not p.borrowed_from:
                rows.append(
                    f"| {name} | {kernel.family} {kernel.variant} | {p.software} | {p.points:,} | {p.fit_mape_pct:.1f} | "
                    f"{p.held_mape_pct:.1f} | {p.held_median_pct:.1f} | {p.held_p90_pct:.1f} |"
                )
    rows.append("\nServing stacks, on deployments that the fit did not see:\n")
    rows += [f"* {stack.name}: {stack.held_back}" for stack in serving_stacks().values() if stack.held_back]
    return "\n".join(rows)
