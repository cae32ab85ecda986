"""Encoders of images and speech in commands: what engines have in common."""

from __future__ import annotations

from sim.errors import RooftraceError
from sim.launch.reading import Reading


def by_hand(replicas: int | str = "N") -> str:
    """How a scenario says machines that only encode."""
    return f"write encode: {{replicas: {replicas}, bandwidth_gb_per_s: GB}} by hand (--set 'encode={{...}}')"


def put_encode(reading: Reading) -> None:
    """Put that the server encodes in its steps, where its model has encoders and nothing leaves them out."""
    if reading.switch("language-model-only") or not reading.encoders:
        return
    reading.put("encode.at", "engine")
    traffic = [_WORKLOAD[each] for each in reading.encoders]
    reading.notes.append(
        f"the model has an encoder of {' and of '.join(reading.encoders)}, which the server runs in its steps: encode is "
        f"{{at: engine}}; {' and '.join(traffic)} {'say' if len(traffic) > 1 else 'says'} what requests have"
    )


_WORKLOAD = {"images": "workload.images", "speech": "workload.audio"}


def refuse_encoder(reading: Reading, option: str) -> None:
    """RooftraceError where *option* starts a server that only encodes."""
    if reading.switch(option):
        raise RooftraceError(
            f"--{option} starts a machine that only encodes, which is no server of a scenario: give the command of the server that "
            f"computes prompts, and {by_hand()}"
        )
