"""The tables that a validation leaves: as CSV, and as the page docs/validation.md."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

from hwmodels import memory_logs
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
            writer = csv.writer(file, lineterminator="\n")
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
    """The page docs/validation.md: the lines by kind of kernel, what is not modelled or was *left_out* and why, and what
    comparisons of *served* runs say by family, stack, model and load.

    Further *sections* follow the errors on data that was not fitted.
    """
    parts = [_HEAD, *_by_kind(line for line in lines if line.quantity == "latency")]
    parts.append("\n## Serving runs and their parts\n")
    parts.append("| file | quantity | priced as | rows | unmodelled | MAPE % | median % | p90 % | bias % |")
    parts.append("| --- | --- | --- | --: | --: | --: | --: | --: | --: |")
    for line in lines:
        if line.quantity != "latency":
            cells = " | ".join(map(_shown, (line.mape_pct, line.median_pct, line.p90_pct, line.bias_pct)))
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
    parts += _held_back()
    parts += [f"\n{section}" for section in sections if section]
    parts.append("\n## KV blocks of engines' logs\n")
    parts.append(memory_logs.markdown())
    parts.append("\n## Serving\n")
    parts.append(served_markdown(served))
    return "\n".join(parts) + "\n"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _by_kind(lines: Iterable[ErrorLine]) -> Iterator[str]:
    """A row for each kind of kernel: the least, median and largest of its files' mean errors, and the file with the largest."""
    kinds: dict[str, list[ErrorLine]] = {}
    for line in lines:
        # What stands before the device, the first word with a digit.
        kinds.setdefault(re.split(r"_[a-z]*\d", line.file)[0].replace("_", " "), []).append(line)
    yield "| kernels | files | rows | least % | median % | largest % | file with the largest |"
    yield "| --- | --: | --: | --: | --: | --: | --- |"
    for kind, several in kinds.items():
        known = sorted((line.mape_pct, line.file) for line in several if line.mape_pct is not None)
        sizes = [size for size, _ in known]
        cells = [sizes[0], median(sizes), sizes[-1]] if sizes else [None] * 3
        worst = known[-1][1] if known else "-"
        rows = sum(line.rows for line in several)
        yield f"| {kind} | {len(several)} | {rows:,} | {' | '.join(map(_shown, cells))} | {worst} |"


_HEAD = """\
# Validation

Written by `rooftrace validate --measured DIR --markdown docs/validation.md --out docs/validation/files.csv`. Errors are relative,
in percent; bias is the mean of predicted / measured - 1, in groups of served rows its median.

| question | where |
| --- | --- |
| how far off are single kernels? | this page; [what remains unexplained of them](validation/kernels.md) |
| how far off are served runs of the public samples? | [serving](#serving) |
| does the KV cache have the size that an engine logs? | [KV blocks](#kv-blocks-of-engines-logs) |
| how far off are servers that nothing was fitted to, and fits to a few runs? | [measured servers](validation/servers.md) |
| do routers rank as measured? | [routers](validation/routers.md) |
| is host memory worth what it was measured to be? | [KV tiers](validation/kv_tiers.md) |
| are prompts of long sessions found as measured? | [sessions](#sessions), [their errors](validation/sessions.md) |
| do separate pools answer as measured? | [separate pools](#separate-pools) |
| do schedulers and caches decide as the engines' own? | [schedulers](validation/schedulers.md) |
| does an endpoint in simulated time answer on time? | [endpoint](validation/endpoint.md) |
| do devices draw what was measured? | [power](validation/power.md) |

## Kernels

The shipped profiles beside all rows of the public measurements, those included that the profiles were fitted to: the mean error of
a file, over the files of a kind of kernel. [files.csv](validation/files.csv) has every file with its mean, median, p90 and bias.
"""

_NAMES = """\
Mean errors on shapes that the scored fit did not see, as the profiles (`hwmodels/profiles/DEVICE.toml`) state them for each
parameter set: the median over the sets of a device, and the largest in brackets. [Kernels](validation/kernels.md) names the
sets beyond 15 %. Sets of one shape or few, which no other shape judges, are not in it.
"""


def _held_back() -> Iterator[str]:
    devices = calibrated_devices()
    held: dict[tuple[str, str], list[float]] = {}
    for name in devices:
        for kernel in load_profile(name).kernels:
            if not kernel.provenance.borrowed_from and kernel.provenance.judged:
                held.setdefault((kernel.family, name), []).append(kernel.provenance.held_mape_pct)
    yield f"| kernel | {' | '.join(devices)} |"
    yield f"| --- | {' | '.join('--:' for _ in devices)} |"
    for family in sorted({family for family, _ in held}):
        cells = (
            f"{median(sets):.1f} ({max(sets):.1f})" if (sets := held.get((family, name))) else "-" for name in devices
        )
        yield f"| {family} | {' | '.join(cells)} |"
