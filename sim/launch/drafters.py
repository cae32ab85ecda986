"""Acceptance and cost that are assumed of a drafter which a command names, and no command says."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hwmodels.model import load_model
from hwmodels.tables import packaged_rows
from policies.acceptance import published
from sim.launch.reading import Reading

if TYPE_CHECKING:
    from hwmodels.model import ModelSpec


class _Row(NamedTuple):
    method: str
    drafter: str
    model: str
    k: int
    mean_length: float
    source: str


@functools.cache
def _rows() -> tuple[_Row, ...]:
    return tuple(
        _Row(row["method"], row["drafter"], row["model"], int(row["k"]), float(row["mean_length"]), row["source"])
        for row in packaged_rows(Path(__file__).parent / "data" / "drafters.csv")
    )


def assumed(reading: Reading, *, generation: str | None, drafter: str | None = None) -> None:
    """Put published acceptance for the drafting that *reading* has, as an assumption that its notes name.

    *generation*: eagle or eagle3, of a checkpoint called *drafter*; None: the model's own layers (mtp).
    """
    k = reading.settings["decoding"].get("num_speculative_tokens")
    if generation is None:
        found, source = _of_own_layers(k)
    else:
        found, source = _of_a_head(generation, drafter or "", k)
        share = _share_of_a_layer(load_model(reading.settings["model"]))
        reading.assumed["decoding.draft"] = (
            {"cost_ratio": share},
            f"decoding.draft is assumed: a pass of the drafter takes {share:.2g} of the model's step, as one layer and the head do",
        )
    reading.assumed["decoding.acceptance"] = (
        found,
        f"decoding.acceptance is assumed: {source}; --set 'decoding.acceptance={{alpha: 0.7}}' says what yours is",
    )


def _of_own_layers(k: int | None) -> tuple[dict[str, Any], str]:
    rates = published("deepseek-v3")
    if (k or 1) <= len(rates.rates):
        return {"published": "deepseek-v3"}, rates.source
    return {"alpha": rates.rates[0]}, f"{rates.source}, taken for all {k} positions, which is more than later ones get"


def _of_a_head(generation: str, drafter: str, k: int | None) -> tuple[dict[str, Any], str]:
    """The row of that drafter, or else of its generation, for the number of tokens that is nearest to *k*."""
    name = drafter.rpartition("/")[2].lower()
    own = [row for row in _rows() if row.drafter and row.drafter in name]
    rows = own or [row for row in _rows() if row.method == generation and not row.drafter]
    row = min(rows, key=lambda row: abs(row.k - (k or 1)))
    return _accepted(row), _told(row)


def _accepted(row: _Row) -> dict[str, Any]:
    return {"mean_length": row.mean_length, "at_k": row.k}


def _told(row: _Row) -> str:
    return f"{row.mean_length} tokens a round with {row.k} drafted, {row.source}"


class PublishedHead(NamedTuple):
    """A drafting head whose acceptance was published for a model: `decoding` of a scenario that uses it, and its source."""

    name: str
    decoding: dict[str, Any]
    source: str


def published_heads(model: ModelSpec) -> list[PublishedHead]:
    """Heads that were measured on *model*, each with as many drafted tokens as give most for the weights that are read."""
    share = _share_of_a_layer(model)
    found = []
    for method in dict.fromkeys(row.method for row in _rows()):
        rows = [row for row in _rows() if row.method == method and model.name.startswith(row.model)]
        if rows:
            best = max(rows, key=lambda row: row.mean_length / (1.0 + row.k * share))
            name = method.upper() if method == "eagle" else f"EAGLE-{method.removeprefix('eagle')}"
            decoding = {
                "method": "eagle", "num_speculative_tokens": best.k, "acceptance": _accepted(best), "draft": {"cost_ratio": share},
            }  # fmt: skip
            found.append(PublishedHead(name, decoding, _told(best)))
    return found


def _share_of_a_layer(spec: ModelSpec) -> float:
    """Weights of one layer and the head over all that a step reads."""
    head = spec.embedding_params
    layers = spec.active_params - head * (1 if spec.tied_embeddings else 2)
    return round((layers / spec.n_layers + head) / (layers + head), 3)
