"""The differences between two profiles, number by number."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hwmodels.profiles.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number of two profiles; None where one of them lacks it."""

    kernel: str
    name: str
    first: float | None
    second: float | None
    remark: str

    @property
    def ratio(self) -> float | None:
        """Second over first."""
        return None if not self.first or self.second is None else self.second / self.first


def compare_profiles(first: Profile, second: Profile) -> list[Difference]:
    """Every datasheet number, parameter and held-back error that differs or that one of the two lacks.

    The remark says whether the 95 % intervals of a fitted parameter overlap, where both profiles kept them.
    """
    found: list[Difference] = []

    def add(kernel: str, name: str, a: float | None, b: float | None, remark: str = "") -> None:
        if a != b:
            found.append(Difference(kernel=kernel, name=name, first=a, second=b, remark=remark))

    first, second = first.whole(), second.whole()
    sheets = [asdict(profile.datasheet) for profile in (first, second)]
    for name in sheets[0]:
        if name == "peak_flops_per_s":
            for dtype in sorted({*sheets[0][name], *sheets[1][name]}):
                add("datasheet", f"peak {dtype}", sheets[0][name].get(dtype), sheets[1][name].get(dtype))
        elif name != "name":
            add("datasheet", name, sheets[0][name], sheets[1][name])
    kernels = [{(kernel.family, kernel.variant): kernel for kernel in profile.kernels} for profile in (first, second)]
    for key in sorted({*kernels[0], *kernels[1]}):
        label, one, other = " ".join(key), kernels[0].get(key), kernels[1].get(key)
        if one is None or other is None:
            have = one or other
            assert have is not None
            error = have.provenance.held_median_pct
            pair = (error, None) if other is None else (None, error)
            add(label, "held-back median %", *pair, f"only the {'first' if other is None else 'second'} has it")
            continue
        for name, value in asdict(one.params).items():
            ends = [kernel.interval.get(name) for kernel in (one, other)]
            remark = ""
            if ends[0] is not None and ends[1] is not None:
                apart = ends[0][1] < ends[1][0] or ends[1][1] < ends[0][0]
                remark = "intervals apart" if apart else "intervals overlap"
            add(label, name, value, getattr(other.params, name), remark)
        add(label, "held-back median %", one.provenance.held_median_pct, other.provenance.held_median_pct)
    return found
