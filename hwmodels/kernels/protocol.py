"""The interface that a cost model asks of a device's kernels: the one seam behind which datasheets, fits and kinds of device
differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hwmodels.kernels.ops import DecodeForm, PrefillForm
from hwmodels.operations import AttentionShape, Exchange, ExpertMlp, HeadProducts, Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """The costs of an iteration on a stage beside its kernels, in seconds."""

    step_s: float = 0.0
    """Host and launch overhead of an iteration."""
    sequence_s: float = 0.0
    """The time of each sequence in the batch."""
    row_s: float = 0.0
    """The time of each token of the iteration."""
    prompt_floor_s: float = 0.0
    """Least time of an iteration with a prompt that has more than `decode_tokens` left: it is launched kernel by kernel."""
    decode_floor_s: float = 0.0
    """Least time of any other."""
    launch_floor_s: float = 0.0
    """Least time of one whose decodes are beyond the captured graphs."""
    decode_tokens: int = 1
    """Tokens left of a prompt up to which the engine replays it as a decode: 1, or 0 where it launches every prompt."""
    compute_factor: float = 1.0
    """The factor on the device's arithmetic: on the time of kernels beyond that for one row, and on attention of prompts."""
    bandwidth_factor: float = 1.0
    """The factor on its reading of weights and cache: on the kernels' time for one row, and on attention of decodes."""
    prompt_factor: float = 1.0
    """The factor on arithmetic, beside `compute_factor`, in iterations that compute prompts."""


class Kernels(Protocol):
    """Seconds of each kind of operation on one device; what tells a datasheet roofline from a calibrated one.

    The `*_s` methods take float64 arrays (or scalars) and need not be fast: they are tabulated. Attention depends on
    more than the rows, so it comes as a form: a function of totals written with + - * / and the given `Ops`, which is
    what makes scalars and arrays agree bit for bit. Times must not fall when an argument grows.

    One may also have `multiplied_pairs(rows, experts)`: the pairs of token and expert that a device multiplies in one layer, those
    among them that only fill tiles, or None, as without it: those that there are.
    """

    @property
    def host(self) -> HostTimes:
        """The costs of an iteration beside these."""
        ...

    def gemm_s(self, m: Any, n: Any, k: Any, *, precision: str) -> Any:
        """One product of *m* rows, m x k times k x n, with weights in *precision*."""
        ...

    def moe_s(self, rows: Any, experts: ExpertMlp) -> Any:
        """One layer's routed experts."""
        ...

    def head_products_s(self, rows: Any, products: HeadProducts) -> Any:
        """One layer's, of rows whose latent attention is absorbed."""
        ...

    def prefill_form(self, shape: AttentionShape) -> PrefillForm:
        """Attention of prompts in all the shape's layers."""
        ...

    def decode_form(self, shape: AttentionShape) -> DecodeForm:
        """Attention of decodes in all the shape's layers."""
        ...

    def elementwise_s(self, size_bytes: Any, launches: int, op: str = "") -> Any:
        """*launches* kernels of one layer that read and write *size_bytes* together; *op*: by a kernel of their own, where it was
        measured."""
        ...

    def recurrence_forms(self, shape: Recurrence) -> tuple[PrefillForm, DecodeForm]:
        """Linear attention of all the shape's layers, which depends on rows and sequences alone."""
        ...

    def collective_s(self, kind: str, size_bytes: Any, n: int) -> Any:
        """An all_reduce, all_gather, reduce_scatter or all_to_all of *n* devices; *size_bytes* of the whole tensor."""
        ...

    def exchange_s(self, rows: Any, exchange: Exchange) -> Any:
        """The time of one layer, both ways: *rows* of all groups to their experts, and what the experts made of them back."""
        ...

    @property
    def captured(self) -> tuple[int, ...] | None:
        """The rows of the graphs that decode steps are padded to, ascending; None: graphs of every size, or none at all."""
        ...

    @property
    def pads_ranks(self) -> bool:
        """Whether each group's decodes are padded to those of the fullest, as one graph on all of them asks for."""
        ...

    def send_s(self, size_bytes: Any, between_nodes: bool) -> Any:
        """The time from one device to another."""
        ...

    def sample_s(self, logit_rows: Any) -> Any:
        """Sampling and its host work."""
        ...
