"""The encoder of speech ahead of a language model, and the positions and tokens that a clip takes in it.

The towers are Whisper's: mel frames, a hundred a second, two convolutions of which one has a stride of two (Qwen3-Omni: three in
two dimensions), and a transformer. Lengths follow the processors and classes of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from hwmodels.model.fields import Config
from hwmodels.model.tower import Encoded, Tower, family_of

Framing = Literal["padded", "windows", "downsampled", "halved_minutes"]

_FRAME_MS = 10
_HALF_MINUTE = 3000
"""Frames of Whisper's input, to which shorter ones are padded."""
_MARKS = 2
"""Tokens that begin and end a clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech(Tower):
    """An encoder of speech."""

    framing: Framing
    most_frames: int | None = None
    """Frames of a clip that are encoded; None: all. Processors cut off the rest."""

    @property
    def longest_ms(self) -> int | None:
        """Milliseconds of a clip that are encoded; None: all."""
        return None if self.most_frames is None else self.most_frames * _FRAME_MS

    def clip(self, ms: int) -> Encoded:
        """Positions and tokens of a clip of so many milliseconds; ValueError for one that makes no embedding."""
        frames = -(-ms // _FRAME_MS)
        if self.most_frames is not None:
            frames = min(frames, self.most_frames)
        if frames < 3:
            raise ValueError(f"a clip of speech is longer than 20 ms; got {ms} ms")
        return _FRAMINGS[self.framing](frames)


def _pooled(frames: int) -> tuple[int, int]:
    """Positions behind the convolutions, and the averages of two of them."""
    positions = (frames - 1) // 2 + 1
    return positions, (positions - 2) // 2 + 1


def _padded(frames: int) -> Encoded:
    embeddings = _pooled(frames)[1]
    return Encoded(1, _HALF_MINUTE // 2, embeddings, embeddings + _MARKS)


def _windows(frames: int) -> Encoded:
    positions, embeddings = _pooled(frames)
    return Encoded(1, positions, embeddings, embeddings + _MARKS)


def _downsampled(frames: int) -> Encoded:
    rest = frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    positions = 13 * (frames // 100) + rest
    return Encoded(1, positions, positions, positions + _MARKS)


def _halved_minutes(frames: int) -> Encoded:
    halves = -(-frames // _HALF_MINUTE)
    embeddings = halves * _HALF_MINUTE // 2 // 4
    # A token ahead of it and none behind.
    return Encoded(halves, _HALF_MINUTE // 2, embeddings, embeddings + 1)


_FRAMINGS: Final[Mapping[Framing, Callable[[int], Encoded]]] = {
    "padded": _padded,
    "windows": _windows,
    "downsampled": _downsampled,
    "halved_minutes": _halved_minutes,
}


def speech_of(config: Mapping[str, Any], *, text_hidden: int, where: str) -> Speech | None:
    """The encoder that a config.json describes; None where it has none, or one of a family that is not modelled."""
    found = family_of(_FAMILIES, config, "audio_config", where)
    if found is None:
        return None
    family, given = found
    return family(given, text_hidden)


def _tower(c: Config) -> dict[str, Any]:
    """The fields of Whisper's encoder. Its sizes are those of Whisper's large model where a config.json leaves them out, as that of
    Qwen2-Audio does."""
    hidden, mel = c.integer("d_model", c.integer("hidden_size", 1280)), c.integer("num_mel_bins", 128)
    return {
        "layers": c.integer("encoder_layers", c.integer("num_hidden_layers", 32)),
        "hidden": hidden,
        "ffn": c.integer("encoder_ffn_dim", c.integer("intermediate_size", 5120)),
        "heads": c.integer("encoder_attention_heads", c.integer("num_attention_heads", 20)),
        # Convolutions over three frames: the first leaves all frames, two for each position, the second every other one.
        "stem": ((2, 3 * mel, hidden), (1, 3 * hidden, hidden)),
    }


def _qwen2_audio(c: Config, text_hidden: int) -> Speech:
    tower = _tower(c)
    return Speech(
        **tower, out=text_hidden, projection=((tower["hidden"], text_hidden),), full_layers=tower["layers"], framing="padded",
        most_frames=_HALF_MINUTE,
    )  # fmt: skip


def _qwen2_5_omni(c: Config, text_hidden: int) -> Speech:
    tower, out = _tower(c), c.integer("output_dim", text_hidden)
    return Speech(
        **tower, out=out, projection=((tower["hidden"], out),), full_layers=0, window=c.integer("n_window", 100),
        framing="windows", most_frames=10 * _HALF_MINUTE,
    )  # fmt: skip


def _qwen3_omni(c: Config, text_hidden: int) -> Speech:
    tower, out, mel = _tower(c), c.integer("output_dim", text_hidden), c.integer("num_mel_bins", 128)
    hidden, width = tower["hidden"], c.integer("downsample_hidden_size", 480)
    # Each convolution of 3 x 3 halves frames and mel bins; a position is eight frames.
    convolutions = ((4 * (mel // 2), 9, width), (2 * (mel // 4), 9 * width, width), (mel // 8, 9 * width, width))
    return Speech(
        **{**tower, "stem": (*convolutions, (1, width * (mel // 8), hidden))}, out=out,
        projection=((hidden, hidden), (hidden, out)), full_layers=0,
        window=13 * (c.integer("n_window_infer", 800) // (2 * c.integer("n_window", 50))), framing="downsampled",
    )  # fmt: skip


def _voxtral(c: Config, text_hidden: int) -> Speech:
    tower = _tower(c)
    return Speech(
        **tower, out=text_hidden, projection=((tower["ffn"], text_hidden), (text_hidden, text_hidden)),
        full_layers=tower["layers"], framing="halved_minutes",
    )  # fmt: skip


_FAMILIES: Final[Mapping[str, Callable[[Config, int], Speech]]] = {
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni_thinker": _qwen2_5_omni,
    "qwen3_omni_moe_thinker": _qwen3_omni,
    "voxtral": _voxtral,
}
"""Families of multimodal models by the model_type of their config.json, or of its thinker."""
