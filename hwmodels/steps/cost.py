"""The cost model over a table of measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.cost import CostModel, Work
from hwmodels.device import Device
from hwmodels.model import ModelSpec
from hwmodels.overheads import ServingStack
from hwmodels.parallel import ParallelConfig
from hwmodels.roofline import Roofline
from hwmodels.steps.files import table_of
from hwmodels.steps.rows import StepRows
from hwmodels.steps.table import Table
from hwmodels.totals import Totals

_OF_LAYOUT = {"tp": "tensor", "pp": "pipeline", "dp": "data"}


class StepCost:
    """Seconds of steps as a table of measured ones has them, and *host_s* more for each.

    A step of ranks takes as long as its slowest rank. Arithmetic and traffic are those of the model on the device's datasheet.
    Times do not fall as tokens grow at equal context, or as context grows.
    """

    n_stages = 1

    def __init__(self, table: Table, host_s: float, theory: CostModel, name: str) -> None:
        """*name* is of the file that the table is from, and of its content."""
        self.table = table
        self.host_s = host_s
        self._name = name
        self.window_tokens = theory.window_tokens
        self.peak_flops_per_s = theory.peak_flops_per_s
        self.peak_bytes_per_s = theory.peak_bytes_per_s
        self._theory = theory

    def scalar_s(self, totals: Totals) -> float:
        """`iteration_s` of one step whose totals are ints."""
        return self.table.second(totals) + self.host_s if totals[0] else 0.0

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        return self.scalar_s(totals) if type(totals.rows) is int else self._array_s(totals)

    def _array_s(self, totals: Totals) -> Any:
        return np.where(np.asarray(totals.rows) > 0, self.table.seconds(totals) + self.host_s, 0.0)

    def common_step(self, ranks: Sequence[Totals], stage: int = 0, /) -> Any:
        if all(type(column) is int for totals in ranks for column in totals):
            return max(map(self.scalar_s, ranks))
        return np.maximum.reduce(np.broadcast_arrays(*map(self._array_s, ranks)))

    def handover_s(self, rows: Any, /) -> Any:
        return 0.0 * rows

    def work(self, totals: Totals, /) -> Work:
        return self._theory.work(totals)

    def __repr__(self) -> str:
        return f"StepCost({self._name}, host_s={self.host_s!r}, work of {self._theory!r})"


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Makes cost models from a file of measured steps; a `CostFactory` for `deploy`.

    *digest* is of the file's content, `digest_of`; *where* singles out a deployment of it; *stack* is the serving stack whose front
    end requests pass.
    """

    file: Path
    digest: str
    stack: ServingStack
    where: tuple[tuple[str, Any], ...] = ()
    host_s: float = 0.0

    @property
    def rows(self) -> StepRows:
        return self._read()[0]

    @property
    def table(self) -> Table:
        return self._read()[1]

    def _read(self) -> tuple[StepRows, Table]:
        return table_of(self.file, self.digest, self.where)

    def __call__(
        self,
        spec: ModelSpec,
        device: Device,
        parallel: ParallelConfig | None = None,
        *,
        kv_precision: str | None = None,
    ) -> StepCost:
        """The cost model of *spec* on *device*; ValueError where the file is of another layout, or has no steps of stages."""
        parallel = parallel or ParallelConfig()
        if parallel.pipeline > 1:
            raise ValueError(
                f"{self.file} has the times of whole steps, which do not say how long each stage of a pipeline takes; "
                "leave parallel.pipeline out"
            )
        rows, table = self._read()
        for name, key in _OF_LAYOUT.items():
            measured = rows.says.get(name)
            if measured is not None and int(float(measured)) != getattr(parallel, key):
                raise ValueError(
                    f"{self.file} was measured with {name} {measured}, and parallel.{key} is {getattr(parallel, key)}; give "
                    f"{{{key}: {measured}}}, or another file"
                )
        theory = Roofline(spec, device, parallel, kv_precision=kv_precision)
        return StepCost(table, self.host_s, theory, f"{self.file.name} {self.digest[:16]} {dict(self.where)}")

    @property
    def title(self) -> str:
        """The source of the times, in words: the file, the number of its steps, and the device and engine that ran them."""
        rows = self.rows
        whose = "".join(f", {name} {value}" for name, value in rows.says.items())
        n, m = len(rows.prompts.seconds), len(rows.decodes.seconds)
        return f"{self.file.name} ({rows.kind} with {n} prompt and {m} decode steps{whose})"

    @property
    def provenance(self) -> Mapping[str, Any]:
        """For manifests."""
        factors = self.table.factors()
        return {
            "profile": f"measured steps: {self.title}",
            "steps": {
                "file": self.file.name,
                "sha256": self.digest,
                **self.rows.says,
                "reach": {
                    what: {"tokens": list(reach.rows), "keys": list(reach.keys)}
                    for what, reach in self.table.reach.items()
                },
                **({} if factors is None else {"held_out_factors": list(factors)}),
            },
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say which deployment the times were measured on, and which costs they leave out."""
        rows, table = self.rows, self.table
        n, most = table.levelled()
        host = (
            f"hardware.host_s adds {self.host_s * 1e3:g} ms to each"
            if self.host_s
            else "hardware.host_s, which is 0, would add to each"
        )
        found = [
            f"Steps are priced by {self.title}: precision and kv_precision change the memory alone. Steps with prompts and decodes "
            f"were not measured and are composed (docs/steps.md). No host work of serving_stack is added to steps; {host}.",
            *rows.notes,
        ]
        if "tp" not in rows.says:
            found.append(
                f"{self.file.name} does not say on how many devices it was measured (a column tp): its times are taken whatever "
                "parallel is."
            )
        if n:
            found.append(
                f"{self.file.name}: {n} measured times fall as tokens or context grow, or repeat others; they are levelled, by "
                f"up to {most:.1%}."
            )
        return tuple(found)
