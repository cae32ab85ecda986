"""rooftrace fit: a calibrated profile from measured files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.options import Dtype, Json, Strict
from sim.cli.tables import print_json, print_notes, print_table
from sim.errors import RooftraceError
from sim.text import unknown
from sim.under_way import steps

if TYPE_CHECKING:
    from hwmodels.device import Device
    from hwmodels.kernels.parameters import Datasheet
    from hwmodels.measured import Measurement
    from hwmodels.profiles import Profile
    from sim.validation.files import Folder


def register(app: typer.Typer) -> None:
    app.command()(fit)


def fit(
    measured: Annotated[
        Path, typer.Option(help="Folder of measured tables (CSV, Parquet), or one table.", show_default=False)
    ],
    device: Annotated[
        str,
        typer.Option(help="Catalogue name, or path to a datasheet (.toml); tables that say no device are of this one."),
    ],
    out: Annotated[Path, typer.Option(help="Profile to write (.toml).", show_default=False)],
    dtype: Dtype = None,
    max_points: Annotated[int, typer.Option(min=50, help="Rows of a kernel that a fit uses at most.")] = 1500,
    strict: Strict = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY[,FAMILY]",
            help="Fit these kernels alone, into the profile that --out is; all else in it stays.",
        ),
    ] = None,
    borrow: Annotated[bool, typer.Option(help="Take what was not measured from the shipped profiles.")] = True,
    as_json: Json = False,
) -> None:
    """Fit a device's kernels to measurements, hold part of the shapes back, report the errors on them.

    Tables are recognised by their columns, which carry their units
    (docs/calibration.md), and belong to the device that a column or their
    name says. Kernels that the folder does not hold are taken from the
    shipped profiles of the device and its relatives, and say so in the
    profile. Exit code 3 when a file or row that is not understood was left
    out.
    """
    from hwmodels.device import load_device
    from hwmodels.measured import Said, format_of
    from hwmodels.profiles import profile_text
    from sim.cli.outputs import check_folder_of, end_with_left_out, put_text
    from sim.validation.files import read_measured

    if out.suffix != ".toml":
        raise RooftraceError(f"--out {out}: a profile is a TOML file; end its name in .toml")
    check_folder_of(out)  # before the minutes that a fit takes
    try:
        target = load_device(device)
        families = _families(only)
        before = _before(out, target.name) if families else None
        told = Said(device=target.name, dtype=format_of(dtype) if dtype else "")
        folder = read_measured(measured, strict=strict, said=told)
        files = _kernel_files(folder, target, measured)
        fitted = _fitted(files, _sheet(target, before), families=families, max_points=max_points)
        too_few = fitted.note.partition("; ")[2]
        if not fitted.kernels:
            raise RooftraceError(f"{measured}: nothing can be fitted: {too_few}; give more rows")
    except (ValueError, OSError) as error:
        raise RooftraceError(str(error)) from None
    if too_few:
        typer.echo(f"Not fitted: {too_few}", err=True)
    profile, said = _completed(fitted, target, before=before, borrow=borrow, out=out)
    put_text(out, profile_text(profile))
    notes = [*dict.fromkeys(f"{m.path.name}: {note}" for m in files for note in m.notes)]
    if as_json:
        kernels = [{"kernel": f"{each.family} {each.variant}", **asdict(each.provenance)} for each in fitted.kernels]
        print_json({"profile": out, "kernels": kernels, "not_fitted": too_few, "notes": [*said, *notes]})
    else:
        _print(fitted)
        for text in (*said, f"Profile: {out}; in a scenario, hardware: {out}", *notes):
            typer.echo(text)
    end_with_left_out(folder)


def _kernel_files(folder: Folder, target: Device, measured: Path) -> list[Measurement]:
    """The tables of *folder* that time kernels of *target*; RooftraceError where there are none."""
    files = [m for m in folder.measurements if _is_of(m, target)]
    if not files:
        print_notes(folder.left_out, head="Left out")
        raise RooftraceError(
            f"{measured} holds no kernel measurements of {target.name}; a column device says it, or the name, as in "
            f"gemm_{target.name.split('-')[0]}_bf16_vllm0.24.csv"
        )
    return files


def _sheet(target: Device, before: Profile | None) -> Datasheet:
    """The datasheet that a fit is over: that of the profile which it changes, if any."""
    from hwmodels.profiles import datasheet_of

    return datasheet_of(target) if before is None else before.datasheet


def _fitted(files: Sequence[Measurement], sheet: Datasheet, *, families: tuple[str, ...], max_points: int) -> Profile:
    """A profile with the kernels that *files* measure, and nothing else."""
    import datetime

    from hwmodels.fit import fit_profile

    return fit_profile(
        files, sheet, fitted_on=datetime.date.today().isoformat(), max_points=max_points, partial=True, only=families,
        counted=lambda kernels: steps(kernels, "kernels"),
    )  # fmt: skip


def _completed(
    fitted: Profile, target: Device, *, before: Profile | None, borrow: bool, out: Path
) -> tuple[Profile, list[str]]:
    """The profile to write, with other kernels of the profile *before* or with borrowed ones, and sentences about them."""
    from hwmodels.fit import refitted
    from hwmodels.profiles import complete

    if before is not None:
        profile = refitted(before, fitted)
        kept = len(before.kernels)
        return profile, [f"Into {out}, whose other kernels stay as they are: {kept} before, {len(profile.kernels)} now"]
    if not borrow:
        return fitted, []
    profile = complete(fitted, _donors(target))
    own = {(kernel.family, kernel.variant) for kernel in fitted.kernels}
    borrowed = [kernel for kernel in profile.kernels if (kernel.family, kernel.variant) not in own]
    lenders = sorted({name for kernel in borrowed for name in kernel.provenance.borrowed_from.split(", ")})
    if not lenders:
        return profile, []
    n_borrowed = len(profile.kernels) - len(own)
    return profile, [f"Not measured here, borrowed from {', '.join(lenders)}: {n_borrowed} kernels"]


def _print(fitted: Profile) -> None:
    """Print the errors of each fitted kernel, on the shapes of the fit and on those held back."""
    rows = [
        (f"{kernel.family} {kernel.variant}", f"{p.points:,}", f"{p.fit_mape_pct:.1f}",
         *(f"{each:.1f}" if p.judged else "-" for each in (p.held_mape_pct, p.held_median_pct, p.held_p90_pct)))
        for kernel in fitted.kernels
        for p in (kernel.provenance,)
    ]  # fmt: skip
    print_table(("kernel", "points", "fit %", "held-back %", "median %", "p90 %"), rows)


def _families(only: str | None) -> tuple[str, ...]:
    """The families that --only names; RooftraceError for one that is none."""
    from hwmodels.kernels.families import FAMILIES

    asked = tuple(dict.fromkeys(word.strip() for word in (only or "").split(",") if word.strip()))
    for name in asked:
        if name not in FAMILIES:
            raise RooftraceError(unknown(f"--only {name}: there is no such family of kernels", name, FAMILIES))
    if only is not None and not asked:
        raise RooftraceError(f"--only names families of kernels; there are {', '.join(FAMILIES)}")
    return asked


def _before(out: Path, device: str) -> Profile:
    """The profile that --only changes."""
    from hwmodels.profiles import read_profile

    if not out.is_file():
        raise RooftraceError(f"--only changes a profile, and --out {out} does not exist; fit without --only first")
    found = read_profile(out)
    if found.name != device:
        raise RooftraceError(f"--out {out} is a profile of {found.name}; got --device {device}")
    return found


def _is_of(measurement: object, target: object) -> bool:
    from hwmodels.device import load_device
    from hwmodels.measured import catalogue_name, is_kernel_level

    if not is_kernel_level(measurement):  # type: ignore[arg-type]
        return False
    label = catalogue_name(measurement.device)  # type: ignore[attr-defined]
    if label == target.name or label in target.aliases:  # type: ignore[attr-defined]
        return True
    try:
        return load_device(label).name == target.name  # type: ignore[attr-defined]
    except ValueError:
        return False


def _donors(target: Device) -> list[Profile]:
    """The profiles whose kernels stand for those that were not measured: the device's shipped profile, or what others lend it."""
    from hwmodels.profiles import borrow_for, calibrated_devices, load_profile

    if target.name in calibrated_devices():
        return [load_profile(target.name)]
    try:
        return [borrow_for(target)]
    except ValueError:
        return []
