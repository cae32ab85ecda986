"""Steps of models of hardly any arithmetic: the host's own time."""

from __future__ import annotations

from collections.abc import Iterator

from hwmodels.kernels.cpu import HostParams
from hwmodels.kernels.families import HOST
from hwmodels.kernels.parameters import Datasheet
from hwmodels.measured.files import Measurement
from hwmodels.measured.part import Part, pick


def host(m: Measurement, device: Datasheet) -> Iterator[Part]:
    for op in ("host", "graph"):
        mask = m.columns["op"] == op
        if mask.any():
            rows, columns = pick(m, mask, {"layers": "layers"})
            yield Part(
                form=HOST, sheet=device, variants=(f"{op}/{m.source}",), rows=rows, columns=columns,
                groups=("layers",), starts=(HostParams(),),
            )  # fmt: skip
