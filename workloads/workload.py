"""A workload: requests as columns of integers, and the clients that send them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from workloads.classes import ServiceClass
from workloads.columns import INT64_MAX, IntArray, first_row, int_column


class Clients(Protocol):
    """Clients of one run whose requests depend on the answers: `Workload.clients` makes them for each run.

    Both methods return requests to send: the row of each, and the instant in nanoseconds, which is not before *now_ns*.
    """

    @property
    def starts_ns(self) -> Sequence[int]:
        """Instants at which clients send without having waited for an answer; `start` is called at each."""
        ...

    def start(self, now_ns: int, /) -> Iterable[tuple[int, int]]: ...

    def ended(self, row: int, now_ns: int, /) -> Iterable[tuple[int, int]]:
        """Requests are sent because the request *row* has ended: it has finished, been rejected, been aborted or been lost."""
        ...


class Cancelling(Clients, Protocol):
    """Clients that give requests up, not after a time of their own (`Workload.abort_ns`) but because others have ended."""

    def cancelled(self) -> Iterable[int]:
        """Requests, each sent before, that nobody waits for any more; asked after each `ended`, and each is told once."""
        ...


class Stop(NamedTuple):
    """Machines stand still from one instant to another: what runs ends its iteration, and none begins."""

    at_ns: int
    until_ns: int
    drops_kv: bool = False
    """Iterations end at once, all KV is dropped, and requests are routed again at the end, with what they have emitted."""
    only_fuller: bool = False
    """The same of machines alone that have more than an even share of the requests."""


class Stopping(Clients, Protocol):
    """Clients that have machines stand still."""

    def stops(self) -> Iterable[Stop]:
        """Stops from now on; asked after each `ended`, and each is told once."""
        ...


MEDIA: Mapping[str, tuple[str, ...]] = {
    "image": ("image_width", "image_height", "image_content"),
    "audio": ("audio_ms", "audio_content"),
}
"""The columns of each medium: the numbers that are the size of an image or a clip, and one for its content."""


def taken_runs(offsets: IntArray, index: IntArray) -> tuple[IntArray, IntArray]:
    """Offsets of the runs of the rows *index*, and the places of what they have."""
    counts = np.diff(offsets)[index]
    found = np.concatenate(([0], np.cumsum(counts)))
    return found, np.repeat(offsets[:-1][index] - found[:-1], counts) + np.arange(found[-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Workload(ABC):
    """Requests of one run: what each of them is, as columns of one length n >= 1, and when it is sent.

    A kind of workload says when: by `sent_ns` for requests that are sent whatever the server does, by `clients` for those that
    depend on the answers. Columns are read-only int64 arrays. Raises ValueError, naming row (from 0), column and value, for
    negative, fractional, NaN or infinite numbers, and a request with neither prompt nor output tokens. A request too long for
    any machine is legal here: the engine rejects it at admission.
    """

    LEAST: ClassVar[Mapping[str, int]] = {
        "prompt_tokens": 0,
        "output_tokens": 0,
        "model_index": 0,
        "deadline_ns": -1,
        "session": -1,
        "priority": -INT64_MAX,
        "max_tokens": 0,
        "abort_ns": -1,
        "class_index": 0,
        "tenant_index": 0,
        "predicted_tokens": 0,
        "encoder_tokens": 0,
        "adapter": -1,
    }
    """The columns with one value a request, and the least value of each; a kind with further columns adds them."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    """Tokens to generate; 0 for single-pass models, whose answer is one pass over the prompt."""
    model_index: IntArray | None = None
    """Row of `models` that each request asks for; None where there is at most one model."""
    models: tuple[str, ...] = ()
    """Names of the models; empty for a single model without a name."""
    deadline_ns: IntArray | None = None
    """Nanoseconds after it was sent by which a request should be finished; -1 where it has no deadline."""
    session: IntArray | None = None
    """Conversation that each request belongs to; -1 where it has none."""
    priority: IntArray | None = None
    """Smaller goes first, as in vLLM; 0 where nothing else is said. What it does is up to the scheduler."""
    max_tokens: IntArray | None = None
    """Output tokens that the client allows at most; None: as many as come out. Schedulers that plan for what may come see it."""
    abort_ns: IntArray | None = None
    """Nanoseconds after it was sent at which the client gives a request up; -1 where it waits for the end."""
    class_index: IntArray | None = None
    """Row of `classes` that each request is of; None where there are no classes of service."""
    classes: tuple[str, ...] = ()
    """Names of the classes; what is agreed of them is in `terms`, where anything is."""
    terms: tuple[ServiceClass, ...] = ()
    """Terms of each of `classes`; empty where these are but names."""
    tenant_index: IntArray | None = None
    """Row of `tenants` that sends each request; None where nobody says who sends it."""
    tenants: tuple[str, ...] = ()
    predicted_tokens: IntArray | None = None
    """Output tokens that a predictor expects of each request; schedulers see it. None: there is no predictor."""
    encoder_tokens: IntArray | None = None
    """Tokens of images and the like that are encoded before the prompt is computed; 0: nothing is. None: nobody says."""
    adapter: IntArray | None = None
    """LoRA adapter that each request asks for, numbered from 0; -1: the base model. None: nobody says."""
    image_offsets: IntArray | None = None
    """n + 1 offsets into the next three: row i has the images from the i-th on, in their order in the prompt. None: nobody says."""
    image_width: IntArray | None = None
    image_height: IntArray | None = None
    """Pixels."""
    image_content: IntArray | None = None
    """A number for what each image shows: equal for equal images, which have one size."""
    audio_offsets: IntArray | None = None
    """Likewise, into the clips of speech in each prompt, which stand behind its images."""
    audio_ms: IntArray | None = None
    audio_content: IntArray | None = None
    prefix_blocks: IntArray | None = None
    """Block ids of all requests end to end; equal ids after equal ids are equal tokens, as far as two requests have them. Where a
    request has more of them than its prompt needs, they name the tokens that it emits as well, which a later prompt may contain;
    what comes after the last is its own. Row i owns `prefix_of(i)`. int32 where it is given so: they are most of a long trace."""
    prefix_offsets: IntArray | None = None
    """n + 1 offsets into `prefix_blocks`."""
    prefix_block_tokens: int | None = None
    """Tokens that one block id stands for (the last block of a request may be partly filled)."""
    source: str = ""
    """The origin of the requests, in words."""
    notes: tuple[str, ...] = ()
    """Sentences on what reading them left out or assumed."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        columns = {name: value for name in self.LEAST if (value := getattr(self, name)) is not None}
        for name, value in columns.items():
            put(self, name, int_column(value, name, minimum=self.LEAST[name]))
        n = len(getattr(self, next(iter(columns))))
        if n == 0:
            raise ValueError("a trace needs at least one request; got none")
        for name in columns:
            if (length := len(getattr(self, name))) != n:
                raise ValueError(f"{name} needs one value a request ({n}); got {length}")
        self._check_rows()
        self._check_models()
        self._check_named("class_index", "classes")
        self._check_named("tenant_index", "tenants")
        if self.terms and tuple(each.name for each in self.terms) != self.classes:
            raise ValueError(f"terms are those of the classes {self.classes!r}, in their order; got {self.terms!r}")
        self._check_prefixes(n)
        for medium, names in MEDIA.items():
            self._check_media(n, f"{medium}_offsets", names)
        if self.abort_ns is not None and ((sent_ns := self.sent_ns) is None or (sent_ns < 0).any()):
            raise ValueError("requests that wait for others cannot be given up as well; leave out abort_ns")

    # When requests are sent.

    @property
    def planned_ns(self) -> IntArray | None:
        """Arrivals as the workload has them, in nanoseconds from the start of the run, however late clients may send: the load that
        is offered. None where answers alone say when clients send."""
        return None

    @property
    def sent_ns(self) -> IntArray | None:
        """The instant at which each request is sent whatever the server does; -1 for one that `clients` send. None: all are."""
        return None

    @abstractmethod
    def clients(self) -> Clients | None:
        """The clients of a new run; None where `sent_ns` says all."""

    def behind(self, in_flight: int) -> Workload:
        """The same requests from clients with at most *in_flight* under way, which send the others as requests end.

        ValueError for requests that depend on answers already.
        """
        raise ValueError("in_flight is for a trace; clients of a closed loop have one request each under way")

    def scale_rate(self, factor: float) -> Self:
        """The same requests *factor* times as fast; ValueError where answers say when requests are sent."""
        raise ValueError("clients that wait for answers have no rate to scale; give more or fewer of them")

    # Other workloads of the same kind.

    def take(self, rows: ArrayLike) -> Self:
        """The requests of the given rows (indices in order, or a boolean mask)."""
        index = np.asarray(rows)
        return replace(self, **self.taken(np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)))

    def taken(self, index: IntArray) -> dict[str, Any]:
        """The fields of `take`; a kind that has more than columns adds them."""
        values = {name: getattr(self, name) for name in self.LEAST}
        changes: dict[str, Any] = {name: None if each is None else each[index] for name, each in values.items()}
        if self.prefix_blocks is not None and self.prefix_offsets is not None:
            changes["prefix_offsets"], rows = taken_runs(self.prefix_offsets, index)
            changes["prefix_blocks"] = self.prefix_blocks[rows]
        for medium, names in MEDIA.items():
            if (offsets := getattr(self, f"{medium}_offsets")) is not None:
                changes[f"{medium}_offsets"], rows = taken_runs(offsets, index)
                changes |= {name: getattr(self, name)[rows] for name in names}
        return changes

    def limit(self, n: int) -> Self:
        """The first *n* requests, or all where there are fewer."""
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ValueError(f"limit is a positive number of requests; got {n!r}")
        return self if n >= len(self) else self.take(np.arange(n))

    def with_models(self, models: str | Sequence[str], model_index: ArrayLike | None = None) -> Self:
        """The same requests asking for other models: one name for all, or names and a row of them a request."""
        names = (models,) if isinstance(models, str) else tuple(models)
        index = None if model_index is None else int_column(model_index, "model_index")
        return replace(self, models=names, model_index=index)

    def called(self, row: int) -> str:
        """A request in words by which it is found in the file that it was read from, whose rows may be in another order."""
        return f"request {row + 1} of the trace"

    # Checks.

    def _check_rows(self) -> None:
        """ValueError where the values of one row contradict each other."""
        if self.max_tokens is not None and (row := first_row(self.max_tokens < self.output_tokens)) is not None:
            raise ValueError(
                f"row {row}: a request emits no more than its max_tokens; got {self.output_tokens[row]} output tokens and "
                f"max_tokens {self.max_tokens[row]}"
            )
        if (row := first_row((self.prompt_tokens == 0) & (self.output_tokens == 0))) is not None:
            raise ValueError(
                f"row {row}: a request needs prompt_tokens or output_tokens above 0; got 0 and 0: leave it out"
            )

    def _check_models(self) -> None:
        models = tuple(self.models)
        object.__setattr__(self, "models", models)
        if any(not isinstance(name, str) or not name for name in models):
            raise ValueError(f"models are non-empty names; got {models!r}")
        if len(set(models)) != len(models):
            raise ValueError(f"models must differ; got {models!r}")
        if self.model_index is None:
            if len(models) > 1:
                raise ValueError(f"a trace of {len(models)} models needs model_index; got none")
            return
        if not models:
            raise ValueError("model_index needs the names in models; got no names")
        if (row := first_row(self.model_index >= len(models))) is not None:
            raise ValueError(
                f"row {row}: model_index is a row of the {len(models)} models; got {self.model_index[row]}"
            )
        if len(models) == 1:
            # One canonical form, so that equal traces compare equal.
            object.__setattr__(self, "model_index", None)

    def _check_named(self, index: str, names: str) -> None:
        """Rows of a table of names, and the names: both or neither."""
        rows, found = getattr(self, index), tuple(getattr(self, names))
        object.__setattr__(self, names, found)
        if (rows is None) != (not found):
            raise ValueError(f"{index} and {names} go together; got only one of them")
        if any(not isinstance(name, str) or not name for name in found) or len(set(found)) != len(found):
            raise ValueError(f"{names} are names that differ; got {found!r}")
        if rows is not None and (row := first_row(rows >= len(found))) is not None:
            raise ValueError(f"row {row}: {index} is a row of the {len(found)} {names}; got {rows[row]}")

    def _check_prefixes(self, n: int) -> None:
        parts = (self.prefix_blocks, self.prefix_offsets, self.prefix_block_tokens)
        if all(part is None for part in parts):
            return
        if self.prefix_blocks is None or self.prefix_offsets is None or self.prefix_block_tokens is None:
            raise ValueError("prefix_blocks, prefix_offsets and prefix_block_tokens go together; got only some of them")
        blocks = int_column(self.prefix_blocks, "prefix_blocks", may_be_short=True)
        offsets = int_column(self.prefix_offsets, "prefix_offsets")
        object.__setattr__(self, "prefix_blocks", blocks)
        object.__setattr__(self, "prefix_offsets", offsets)
        tokens = self.prefix_block_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or tokens < 1:
            raise ValueError(f"prefix_block_tokens is a positive integer; got {tokens!r}")
        object.__setattr__(self, "prefix_block_tokens", int(tokens))
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(blocks) or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"prefix_offsets are {n + 1} non-decreasing numbers from 0 to the {len(blocks)} of prefix_blocks; "
                f"got {offsets!r}"
            )
        counts = np.diff(offsets)
        too_many = counts > -(-(self.prompt_tokens + self.output_tokens) // int(tokens))
        if (row := first_row(too_many)) is not None:
            raise ValueError(
                f"row {row}: prefix_blocks has {offsets[row + 1] - offsets[row]} blocks of {tokens} tokens "
                f"for a prompt of {self.prompt_tokens[row]} and {self.output_tokens[row]} output tokens; they cannot have more"
            )

    def _check_media(self, n: int, name: str, names: tuple[str, ...]) -> None:
        parts = [getattr(self, each) for each in (name, *names)]
        if all(part is None for part in parts):
            return
        if any(part is None for part in parts):
            raise ValueError(f"{name} and {', '.join(names)} go together; got only some of them")
        offsets = int_column(getattr(self, name), name)
        object.__setattr__(self, name, offsets)
        columns = [int_column(getattr(self, each), each, minimum=0 if each == names[-1] else 1) for each in names]
        for each, column in zip(names, columns, strict=True):
            object.__setattr__(self, each, column)
        lengths = {len(column) for column in columns}
        if len(offsets) != n + 1 or offsets[0] != 0 or {int(offsets[-1])} != lengths or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"{name} are {n + 1} non-decreasing numbers from 0 to the entries of {names[-1]}; got {offsets!r}"
            )
        *sizes, content = columns
        order = np.lexsort((*sizes, content))
        same = np.diff(content[order]) == 0
        if (same & np.any([np.diff(size[order]) != 0 for size in sizes], axis=0)).any():
            raise ValueError(
                f"entries with the same {names[-1]} are equal and have one size; give others another number"
            )

    # Single requests.

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} requests, source={self.source!r})"

    def prefix_of(self, row: int) -> IntArray:
        """Block ids of one request's prompt, in order; empty without prefix blocks."""
        if self.prefix_blocks is None or self.prefix_offsets is None:
            return np.empty(0, dtype=np.int64)
        row = range(len(self))[row]
        return self.prefix_blocks[self.prefix_offsets[row] : self.prefix_offsets[row + 1]]

    def media_of(self, medium: str, row: int) -> list[tuple[int, ...]]:
        """Size and content of each of a request's images (`image`) or clips of speech (`audio`)."""
        offsets = getattr(self, f"{medium}_offsets")
        if offsets is None:
            return []
        row = range(len(self))[row]
        own = slice(int(offsets[row]), int(offsets[row + 1]))
        return list(zip(*(getattr(self, name)[own].tolist() for name in MEDIA[medium]), strict=True))

    def model_of(self, row: int) -> str | None:
        """The name of the model that a request asks for; None without names."""
        row = range(len(self))[row]
        if not self.models:
            return None
        return self.models[0 if self.model_index is None else int(self.model_index[row])]


W = TypeVar("W", bound=Workload)
