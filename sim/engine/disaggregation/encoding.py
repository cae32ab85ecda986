"""The course of requests that are encoded before their prompt is computed: a stage with a queue and a cost, before another course.

A request waits at an encoder in order of arrival and is encoded in a batch; what comes of it crosses the encoder's link, and then
the request comes to the next course. One whose machine fails, at whatever stage, is encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from sim.engine.disaggregation.course import HEARD_AFTER_NS, Course, Interrupted, Messages, Present
from sim.engine.gateway.gateway import Gateway
from sim.engine.machine.any_machine import AnyMachine
from sim.engine.machine.encoder import Encoder
from sim.engine.machine.machine import Machine
from sim.engine.record.columns import ABORTED, UNFINISHED
from sim.engine.requests.state import RequestState
from sim.engine.spec.encoding import ENCODE, EncodeSpec
from sim.engine.time.events import Clock

_TIMES: Final = ("encode_begin_ns", "encoded_ns", "encode_landed_ns")


class Encoding(Course[Encoder]):
    """Requests until they have been encoded; then another course has them."""

    def __init__(
        self, spec: EncodeSpec, encoders: Sequence[Encoder], gate: Gateway[Encoder], after: Course[Machine], state: RequestState,
        clock: Clock,
    ) -> None:  # fmt: skip
        """*gate* routes to the encoders, and *after* has the requests that have been encoded."""
        super().__init__(gate, state)
        self.stages = (ENCODE, *after.stages)
        self._after = after
        self.awaiting = after.awaiting
        self._spec = spec
        self._clock = clock
        self._messages = Messages(clock, self._on_landed)
        self._on_link: dict[int, Encoder] = {}
        """Requests on their way from their encoder."""
        self._at = {name: state.column("q", -1) for name in _TIMES}
        self._encoder = state.column("i", -1)
        self._passages = state.column("i")
        """Times that a request was given up before it was encoded, or begun anew."""
        self._encoded, self._found = (state.column("i"), state.column("i")) if spec.caches else (None, None)
        """Images that were encoded for each request, and those that were found encoded; None where no machine keeps them."""
        for encoder in encoders:
            encoder.begun = self._on_begun
            encoder.done = self._on_done
        self._encoders = {encoder.index: encoder for encoder in encoders}

    def attend(self, present: Present) -> None:
        super().attend(present)
        self._after.attend(present)

    def _is_here(self, id_: int) -> bool:
        """Whether a request has yet to be encoded, or to arrive after that."""
        return self._spec.sizes[id_] > 0 and self._at["encode_landed_ns"][id_] < 0

    def come(self, id_: int) -> None:
        if self._is_here(id_):
            super().come(id_)
        else:
            self._after.come(id_)

    def _took(self, id_: int, machine: Encoder, stage: str) -> None:
        self._encoder[id_] = machine.index
        super()._took(id_, machine, stage)

    def _on_begun(self, id_: int, now_ns: int, n_encoded: int, n_found: int) -> None:
        self._at["encode_begin_ns"][id_] = now_ns
        if self._encoded is not None and self._found is not None:
            self._encoded[id_] += n_encoded
            self._found[id_] += n_found

    def _on_done(self, encoder: Encoder, batch: list[int], now_ns: int) -> None:
        for id_ in batch:
            if self._state.status[id_] != UNFINISHED:
                continue
            self._at["encoded_ns"][id_] = now_ns
            self._on_link[id_] = encoder
            sent = encoder.link.send(now_ns, round(self._spec.sizes[id_] * self._spec.bytes_per_unit))
            self._messages.later(sent.arrived_ns + HEARD_AFTER_NS, 0, id_, self._passages[id_])
            if self.present is not None:
                self.present.computed(encoder, 0)
        if self.present is not None:
            self.present.perhaps_empty(encoder)

    def _on_landed(self, _what: int, id_: int, which: int) -> None:
        if which != self._passages[id_]:
            return
        self._at["encode_landed_ns"][id_] = self._clock.now_ns
        encoder = self._on_link.pop(id_)
        if self.present is not None:
            self.present.perhaps_empty(encoder)
        self._after.come(id_)

    def come_again(self, id_: int) -> None:
        self._passages[id_] += 1
        for column in self._at.values():
            column[id_] = -1
        self._encoder[id_] = -1
        self._after.come_again(id_)

    def ended(self, id_: int, now_ns: int) -> None:
        self._after.ended(id_, now_ns)

    def give_up(self, id_: int) -> bool:
        if not self._is_here(id_) or self._encoder[id_] < 0:
            return self._after.give_up(id_)
        encoder = self._encoders[self._encoder[id_]]
        self._state.status[id_] = ABORTED
        self._passages[id_] += 1
        self._on_link.pop(id_, None)
        encoder.give_up(id_)
        if self.present is not None:
            self.present.perhaps_empty(encoder)
        return True

    # Questions of the fleet.

    def role_of(self, machine: AnyMachine) -> str:
        return ENCODE if machine.index in self._encoders else self._after.role_of(machine)

    def wanted(self, id_: int) -> list[tuple[str, Sequence[AnyMachine]]]:
        return super().wanted(id_) if self._is_here(id_) else self._after.wanted(id_)

    def ways(self, id_: int) -> list[list[Sequence[AnyMachine]]]:
        here = [self._entry.hosting(id_)] if self._is_here(id_) else []
        return [[*here, *way] for way in self._after.ways(id_)]

    def first_token_by(self, id_: int) -> list[int]:
        return self._after.first_token_by(id_)

    def last_tokens(self, id_: int) -> int:
        return self._after.last_tokens(id_)

    def needs(self, machine: AnyMachine) -> bool:
        return machine in self._on_link.values() or self._after.needs(machine)

    def interrupt(self, machine: AnyMachine, keeps_kv: Callable[[int], bool]) -> Interrupted:
        encoder = self._encoders.get(machine.index)
        if encoder is None:
            return self._after.interrupt(machine, keeps_kv)
        encoder.link.stop(self._clock.now_ns)
        lost = [id_ for id_, each in self._on_link.items() if each is encoder]
        for id_ in lost:
            del self._on_link[id_]
            self._passages[id_] += 1
        return Interrupted(encoder.has, lost)

    # Results, and what is checked.

    def places(self, id_: int) -> int:
        here = self._is_here(id_) and self._encoder[id_] >= 0 and id_ in self._encoders[self._encoder[id_]].has
        return here + (id_ in self._on_link) + self._after.places(id_)

    def facts(self) -> dict[str, Any]:
        found = [
            {"machine": index, "batches": encoder.events, "link_busy_ns": encoder.link.busy_ns}
            for index, encoder in self._encoders.items()
        ]
        return {"encoders": found, **self._after.facts()}

    def columns(self) -> dict[str, Any]:
        found: dict[str, Any] = {"encoder": np.frombuffer(self._encoder, np.int32)}
        found |= {name: np.frombuffer(values, np.int64) for name, values in self._at.items()}
        if self._encoded is not None and self._found is not None:
            found["encoded_images"] = np.frombuffer(self._encoded, np.int32)
            found["image_hits"] = np.frombuffer(self._found, np.int32)
        return found | self._after.columns()
