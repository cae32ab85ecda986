"""rooftrace models: the catalogue of models."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from sim.cli.options import Fetch, Json, wants_json
from sim.cli.tables import print_facts, print_json, print_table
from sim.errors import RooftraceError


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="List the models of the catalogue, or show one.", invoke_without_command=True)
    group.callback()(models)
    group.command()(show)
    app.add_typer(group, name="models")


def models(
    ctx: typer.Context,
    as_json: Json = False,
) -> None:
    """List the models of the catalogue with their sources."""
    if ctx.invoked_subcommand is not None:
        return
    from hwmodels.model import load_model, model_catalogue

    found: list[dict[str, Any]] = []
    for name in model_catalogue():
        try:
            found.append(_facts(load_model(name)))
        except ValueError as error:
            found.append({"name": name, "refused": str(error)})
    if as_json:
        print_json(found)
        return

    rows = [
        (model["name"], "-", "-", "-", "-", f"not modelled: {model['refused']}")
        if "refused" in model
        else (
            model["name"],
            f"{model['params'] / 1e9:,.2f}",
            f"{model['active_params'] / 1e9:,.2f}",
            f"{model['weight_bytes'] / 1e9:,.1f}",
            f"{model['kv_bytes_per_token'] / 1e3:,.1f}",
            model["source"],
        )
        for model in found
    ]
    print_table(("Model", "params, 1e9", "active, 1e9", "weights, GB", "KV/token, kB", "Source"), rows, fold=1)


def show(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Name in the catalogue or on the HuggingFace hub, or path to a config.json.")
    ],
    as_json: Json = False,
    fetch: Fetch = False,
) -> None:
    """Show what is known of one model."""
    from hwmodels.model import load_model
    from sim.cli.given import fetch_models

    if fetch:
        fetch_models([name])
    try:
        spec = load_model(name)
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    facts = _facts(spec)
    if wants_json(ctx, as_json):
        print_json({**facts, "notes": [*spec.notes]})
        return
    facts["notes"] = " ".join(spec.notes) or "-"
    print_facts(
        [(key, f"{value:,}" if isinstance(value, int | float) else str(value or "-")) for key, value in facts.items()]
    )


def _facts(spec: Any) -> dict[str, Any]:
    return {
        "name": spec.name,
        "family": spec.family,
        "layers": spec.n_layers,
        "attention_layers": ", ".join(f"{n} {kind}" for kind, n in Counter(spec.layer_attention).items()),
        "expert_layers": sum(spec.layer_is_moe),
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "params": spec.params,
        "active_params": spec.active_params,
        "attention_precision": spec.attention_precision,
        "mlp_precision": spec.mlp_precision,
        "expert_precision": None if spec.experts is None else spec.expert_precision,
        "base_precision": spec.base_precision,
        "kv_precision": spec.kv_precision or spec.base_precision,
        "weight_bytes": spec.weight_bytes(),
        "kv_bytes_per_token": spec.kv_bytes_per_token(),
        "state_bytes_per_sequence": spec.state_bytes_per_sequence,
        "window_tokens": spec.window_tokens,
        "max_positions": spec.max_positions,
        "mtp_layers": spec.mtp_layers,
        "source": spec.source,
    }
