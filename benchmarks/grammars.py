"""The time that grammars take on the host: vLLM's own manager of structured output with xgrammar, over answers of a JSON schema.

Needs an installed vLLM (0.32.0 when the terms of hwmodels/grammars.toml were taken) and a vocabulary in tiktoken's format.

    python benchmarks/grammars.py VOCABULARY.tiktoken
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import random
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

SCHEMAS = {"5 fields": (5, 0), "12 fields, a level below": (12, 1), "40 fields, two levels below": (40, 2)}
_WORDS = ("alpha", "the quick", "brown", "fox jumps", "over lazy", "dog", "report", "value")


def a_schema(n: int, levels: int, rng: random.Random) -> dict[str, Any]:
    """An object of *n* required fields, some of which are objects, lists or one of four words."""
    fields: dict[str, Any] = {}
    for i in range(n):
        kind, name = rng.random(), f"field_{rng.randrange(1000)}_{i}"
        if levels and kind < 0.3:
            fields[name] = a_schema(max(2, n // 2), levels - 1, rng)
        elif kind < 0.45:
            fields[name] = {"type": "array", "items": {"type": "number"}}
        elif kind < 0.6:
            fields[name] = {"type": "integer"}
        else:
            fields[name] = {"enum": ["red", "green", "blue", "none"]} if kind < 0.7 else {"type": "string"}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def an_answer(schema: dict[str, Any], rng: random.Random) -> Any:
    """An answer that keeps to *schema*."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        return {name: an_answer(each, rng) for name, each in schema["properties"].items()}
    if kind == "array":
        return [an_answer(schema["items"], rng) for _ in range(rng.randrange(1, 5))]
    if kind == "number":
        return round(rng.random() * 100, 3)
    return rng.randrange(10_000) if kind == "integer" else " ".join(rng.choices(_WORDS, k=rng.randrange(1, 12)))


def tokens_of(text: str, ids: dict[bytes, int]) -> list[int]:
    """The longest token first."""
    rest, found = text.encode(), list[int]()
    while rest:
        length = next(n for n in range(min(16, len(rest)), 0, -1) if rest[:n] in ids)
        found.append(ids[rest[:length]])
        rest = rest[length:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=Path)
    lines = parser.parse_args().vocabulary.read_bytes().splitlines()
    xgr: Any = importlib.import_module("xgrammar")
    vocabulary = [base64.b64decode(line.split()[0]) for line in lines if line.strip()]
    ids = {token: i for i, token in enumerate(vocabulary)}
    size = len(vocabulary) + 64
    encoded = [*vocabulary, *(f"<|{i}|>".encode() for i in range(64))]
    info = xgr.TokenizerInfo(encoded, vocab_type=xgr.VocabType.RAW, vocab_size=size, stop_token_ids=[size - 1])
    compiler = xgr.GrammarCompiler(info, max_threads=8, cache_enabled=True)
    rng = random.Random(0)
    schemas = {name: a_schema(*each, rng) for name, each in SCHEMAS.items()}
    for name, schema in schemas.items():
        times = list[float]()
        for _ in range(5):
            compiler.clear_cache()
            began = time.perf_counter()
            compiler.compile_json_schema(json.dumps(schema))
            times.append(time.perf_counter() - began)
        compiled = compiler.compile_json_schema(json.dumps(schema))
        print(f"{name}: {median(times) * 1e3:.1f} ms to compile, {compiled.memory_size_bytes / 1e6:.2f} MB")
    schema = schemas["12 fields, a level below"]
    compiled = compiler.compile_json_schema(json.dumps(schema))
    for n in (1, 16, 64, 128):
        texts = [tokens_of(json.dumps(an_answer(schema, rng)), ids) for _ in range(n)]
        filled, sorted_, accepted = (each * 1e6 for each in _times(xgr, compiled, texts, size))
        print(f"{n} sequences, us each: {filled:.1f} to fill, {sorted_:.1f} to sort, {accepted:.1f} to accept")


def _times(xgr: Any, compiled: Any, texts: list[list[int]], size: int) -> tuple[float, float, float]:
    """Seconds a sequence and iteration in which its mask is filled, put in its row, and its token accepted."""
    room = importlib.import_module("vllm.v1.structured_output")
    grammar_of = importlib.import_module("vllm.v1.structured_output.backend_xgrammar").XgrammarGrammar
    manager = object.__new__(room.StructuredOutputManager)
    vars(manager).update(
        vllm_config=SimpleNamespace(
            num_speculative_tokens=0,
            scheduler_config=SimpleNamespace(max_num_seqs=len(texts)),
            model_config=SimpleNamespace(is_diffusion=False),
        ),
        backend=SimpleNamespace(allocate_token_bitmask=lambda n: xgr.allocate_token_bitmask(n, size)),
        fill_bitmask_parallel_threshold=128,
        enable_in_reasoning=True,
        reasoner_cls=None,
        _grammar_bitmask=None,
        _full_mask=importlib.import_module("torch").tensor(-1),
    )
    grammars = [grammar_of(matcher=xgr.GrammarMatcher(compiled), vocab_size=size, ctx=compiled) for _ in texts]
    requests = {
        str(i): SimpleNamespace(structured_output_request=SimpleNamespace(grammar=each, reasoning_ended=True))
        for i, each in enumerate(grammars)
    }
    rows = xgr.allocate_token_bitmask(len(texts), size).numpy()
    steps, spent = min(map(len, texts)), [0.0, 0.0, 0.0]
    for step in range(steps):
        began = time.perf_counter()
        masks = manager.grammar_bitmask(requests, list(requests), {})
        filled = time.perf_counter()
        for i in range(len(texts)):
            rows[i] = masks[i]
        put = time.perf_counter()
        for i, grammar in enumerate(grammars):
            assert grammar.accept_tokens(str(i), [texts[i][step]])
        done = time.perf_counter()
        spent = [spent[0] + filled - began, spent[1] + put - filled, spent[2] + done - put]
    per = steps * len(texts)
    return spent[0] / per, spent[1] / per, spent[2] / per


if __name__ == "__main__":
    main()
