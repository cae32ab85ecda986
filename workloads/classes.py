"""Classes of service: what is agreed of the requests of one."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.columns import NS_PER_S
from workloads.streams import check_positive

_LIMITS = ("deadline_s", "ttft_s", "tpot_s", "e2el_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """Terms that are agreed for the requests of a class. Times in seconds; None: nothing."""

    name: str
    priority: int | None = None
    """Smaller goes first, as in vLLM."""
    weight: float = 1.0
    """The part that it has of its tenant's share of the service, beside those of others."""
    tenant: str | None = None
    """The tenant that sends them; None: the class is a tenant of its own."""
    deadline_s: float | None = None
    """From arrival to the last token; schedulers see it."""
    ttft_s: float | None = None
    """Limits that figures are counted against; schedulers see that of the first token."""
    tpot_s: float | None = None
    e2el_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a class has a name; got {self.name!r}")
        check_positive(self.weight, f"weight of class {self.name}")
        for name in _LIMITS:
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), f"{name} of class {self.name}")

    @property
    def first_token_ns(self) -> int:
        """The limit of the first token, from arrival; -1: none."""
        return -1 if self.ttft_s is None else round(self.ttft_s * NS_PER_S)
