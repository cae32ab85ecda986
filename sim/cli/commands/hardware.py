"""rooftrace hardware: the catalogue of devices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sim.cli.options import Json, wants_json
from sim.cli.tables import console, print_json, print_table
from sim.errors import RooftraceError


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="List the devices of the catalogue, or show one.", invoke_without_command=True)
    group.callback()(hardware)
    group.command()(show)
    group.command()(diff)
    app.add_typer(group, name="hardware")


def hardware(
    ctx: typer.Context,
    sources: Annotated[bool, typer.Option("--sources", help="Also where the peaks are from.")] = False,
    as_json: Json = False,
) -> None:
    """List the devices of the catalogue with their peaks (dense, not sparse)."""
    if ctx.invoked_subcommand is not None:
        return
    from hwmodels.device import device_catalogue

    devices = list(device_catalogue().values())
    if as_json:
        print_json([_facts(device) for device in devices])
        return

    rows = [
        (
            device.name,
            _tera(device, "bf16", "fp16", "fp32"),
            _tera(device, "fp8"),
            f"{device.memory_bytes / 2**30:,.0f}",
            f"{device.hbm_bytes_per_s / 1e12:,.2f}",
            f"{device.link.bytes_per_s / 1e9:,.0f}",
            f"{device.tdp_w:,.0f}",
            "-" if device.price_usd_per_hour is None else f"{device.price_usd_per_hour:.2f}",
            *([_peak_source(device)] if sources else ()),
        )
        for device in devices
    ]
    heads = ("Device", "16-bit, TFLOP/s", "fp8", "GiB", "TB/s", "link GB/s", "W", "$/h")
    if sources:
        print_table((*heads, "Source of the peaks"), rows, fold=1)
    else:
        print_table(heads, rows)


def show(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Catalogue name, or path to a datasheet or profile.")],
    as_json: Json = False,
) -> None:
    """Show one device with the source of every number, and what its kernels are priced from."""
    from hwmodels.hardware import load_hardware
    from hwmodels.prices import list_prices

    try:
        device = load_hardware(name)
        kernels = _kernels(device, name)
    except ValueError as error:
        raise RooftraceError(str(error)) from None
    facts = _facts(device)
    listed = list_prices().of.get(device.name, ())
    if wants_json(ctx, as_json):
        print_json({**facts, "kernels": kernels, "prices": [asdict(each) for each in listed]})
        return
    rows = [
        (key, "-" if value is None else f"{value:,g}", device.sources.get(key, "-"))
        for key, value in facts["numbers"].items()
    ]
    print_table(("", "value, SI units", "Source"), rows, title=device.title, fold=1)
    console().print(f"Kernels: {kernels}.")
    if listed:
        rows = [(each.provider, f"{each.usd_per_hour:.2f}", each.seen, each.listed) for each in listed]
        title = "On-demand list prices; the first is the default, costs.provider chooses"
        print_table(("Provider", "$/h", "seen", "listed"), rows, title=title, fold=3)


def diff(
    ctx: typer.Context,
    first: Annotated[str, typer.Argument(help="Device name, or path to a calibrated profile (.toml).")],
    second: Annotated[str, typer.Argument(help="The profile to compare with it.")],
    as_json: Json = False,
) -> None:
    """Compare two calibrated profiles: datasheet numbers and every fitted parameter, with their intervals."""
    from hwmodels.profiles import compare_profiles, load_profile

    try:
        profiles = [load_profile(name) for name in (first, second)]
    except (ValueError, OSError) as error:
        raise RooftraceError(str(error)) from None
    found = compare_profiles(*profiles)
    if wants_json(ctx, as_json):
        print_json([{**asdict(line), "ratio": line.ratio} for line in found])
        return
    rows = [
        (
            line.kernel,
            line.name,
            "-" if line.first is None else f"{line.first:.4g}",
            "-" if line.second is None else f"{line.second:.4g}",
            "-" if line.ratio is None else f"{line.ratio:.3f}",
            line.remark,
        )
        for line in found
    ]
    names = [profile.name for profile in profiles]
    if names[0] == names[1]:  # two profiles of one device are told apart by their files
        names = [Path(called).name for called in (first, second)]
    if names[0] == names[1]:
        names = ["first", "second"]
    heads = ("Kernel", "Quantity", *names, "second / first", "")
    print_table(heads, rows, left=2, fold=1)


def _kernels(device: Any, name: str) -> str:
    """Words on what prices the kernels of *device*."""
    from hwmodels.profiles import borrow_for, calibrated_devices, load_profile, read_profile
    from hwmodels.tables import is_profile

    if name.endswith(".toml") and is_profile(name):
        profile = read_profile(name)
    elif name.endswith(".toml") or device.name not in calibrated_devices():
        try:
            return borrow_for(device).note
        except ValueError as error:
            return str(error)
    else:
        profile = load_profile(device.name)
    own = [kernel for kernel in profile.kernels if not kernel.provenance.borrowed_from]
    families = ", ".join(dict.fromkeys(kernel.family for kernel in own))
    kept = len(profile.kernels) - len(own)
    lent = f"; {kept} more, lent by other devices, are in the file" if kept else ""
    if profile.lender is not None:
        lent = "; what is not among them is lent by other devices where these can, and a run says so"
    return f"parameter sets fitted to measurements of the device: {len(own)} ({families}){lent}"


def _facts(device: Any) -> dict[str, Any]:
    numbers = {f"peak.{arithmetic}": peak for arithmetic, peak in device.peak_flops_per_s.items()}
    for key in (
        "memory_bytes",
        "hbm_bytes_per_s",
        "n_cores",
        "devices_per_node",
        "tdp_w",
        "l2_bytes",
        "clock_hz",
        "price_usd_per_hour",
    ):
        numbers[key] = getattr(device, key)
    for head in ("link", "network", "host"):
        link = getattr(device, head)
        numbers[f"{head}.latency_s"] = None if link is None else link.latency_s
        numbers[f"{head}.bytes_per_s"] = None if link is None else link.bytes_per_s
    return {"name": device.name, "title": device.title, "numbers": numbers, "sources": dict(device.sources)}


def _peak_source(device: Any) -> str:
    return device.sources.get("peak.bf16") or device.sources.get("peak.fp16") or device.sources.get("peak.fp32", "-")


def _tera(device: Any, *choices: str) -> str:
    peaks = [device.peak_flops_per_s[choice] for choice in choices if choice in device.peak_flops_per_s]
    return f"{peaks[0] / 1e12:,.0f}" if peaks else "-"
