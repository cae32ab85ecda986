"""Models for live runs: a catalogue model made smaller, and one that steps with a cache of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hwmodels.model import CATALOGUE, load_model


def scaled_config(name: str, scale: float) -> dict[str, Any]:
    """The catalogue model's config.json with about *scale* of its parameters: depth and width by the cube root.

    Heads keep their width; the vocabulary stays. ValueError for models that are neither GPT-2 nor Llama.
    """
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"scale is a share of the parameters in (0, 1]; got {scale!r}")
    path = CATALOGUE / f"{load_model(name).name}.json"
    config = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key != "rooftrace"}
    side = scale ** (1.0 / 3.0)
    if config["model_type"] == "gpt2":
        head = config["n_embd"] // config["n_head"]
        config["n_head"] = max(1, round(config["n_head"] * side))
        config["n_embd"] = head * config["n_head"]
        config["n_layer"] = max(1, round(config["n_layer"] * side))
    elif config["model_type"] == "llama":
        head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        group = config["num_attention_heads"] // config.get("num_key_value_heads", config["num_attention_heads"])
        groups = max(1, round(config["num_attention_heads"] * side / group))
        config["num_attention_heads"], config["num_key_value_heads"] = groups * group, groups
        config["hidden_size"], config["head_dim"] = head * groups * group, head
        config["intermediate_size"] = max(64, round(config["intermediate_size"] * side / 64) * 64)
        config["num_hidden_layers"] = max(1, round(config["num_hidden_layers"] * side))
    else:
        raise ValueError(f"live runs build GPT-2 and Llama models; {name} is a {config['model_type']}")
    return config


class Running:
    """A model with its own cache, allocated once, so that a step writes and a roll-back only moves the end."""

    def __init__(self, torch: Any, model: Any, *, batch: int, room: int, device: str, seed: int) -> None:
        from transformers.cache_utils import Cache

        self.model, self.batch = model, batch
        layers = model.config.num_hidden_layers
        kind = cache_layer(torch)
        self.layers = [kind(room) for _ in range(layers)]
        self.cache = Cache(layers=self.layers)
        generator = torch.Generator().manual_seed(seed)
        high = model.config.vocab_size
        self.ids = torch.randint(high, (batch, max(room, 16)), generator=generator).to(device)

    def feed(self, tokens: int) -> None:
        """Put *tokens* of the context into the cache."""
        if tokens:
            self.step(tokens)

    def step(self, tokens: int, last: Any = None) -> Any:
        """Run *tokens* query tokens (the last one as given) and return the most likely next token.

        Logits of all of up to 16 query tokens, as a verification needs, and of the last one of a longer prompt.
        """
        ids = self.ids[:, :tokens]
        if last is not None:
            ids = last
        keep = 0 if tokens <= 16 else 1
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep)
        return out.logits[:, -1:].argmax(-1)

    def drop(self, tokens: int) -> None:
        """Forget the last *tokens* of the cache."""
        for layer in self.layers:
            layer.length -= tokens

    def keep(self) -> Callable[[], None]:
        """A function that takes the cache back to its present length."""
        length = self.layers[0].length

        def undo() -> None:
            for layer in self.layers:
                layer.length = length

        return undo


def cache_layer(torch: Any) -> Any:
    """A class of cache layers that writes into one allocation, for the transformers that is installed."""
    from transformers.cache_utils import DynamicLayer

    class Layer(DynamicLayer):
        """Keys and values in one allocation of *room* tokens; those up to `length` count."""

        def __init__(self, room: int) -> None:
            super().__init__()
            self.room, self.length = room, 0

        def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.dtype, self.device = key_states.dtype, key_states.device
                batch, heads, _, width = key_states.shape
                self.keys = torch.empty(batch, heads, self.room, width, dtype=self.dtype, device=self.device)
                self.values = torch.empty_like(self.keys)
                self.is_initialized = True
            assert self.keys is not None
            assert self.values is not None
            end = self.length + key_states.shape[-2]
            self.keys[:, :, self.length : end] = key_states
            self.values[:, :, self.length : end] = value_states
            self.length = end
            return self.keys[:, :, :end], self.values[:, :, :end]

        def get_seq_length(self) -> int:
            return self.length

    return Layer
