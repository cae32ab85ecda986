"""Speculative decoding: every table of the source documents, each number simulated in the event loop where it can be.

Where a closed form exists, it has a row of its own beside the simulated one. A simulated mean is given the document's
tolerance and three standard errors of the simulation. Published numbers enter only as inputs that a row names (alpha,
c, step times) and as what the result is compared with.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from sim.reproduce.rows import Part, Row
from sim.reproduce.speculative import cache, pictures, sampling, servers, systems, tables
from sim.reproduce.speculative.pictures import gap_scenario

__all__ = ["PARTS", "TITLE", "gap_scenario", "plots", "rows"]

TITLE = "Speculative decoding"

PARTS = (
    Part("sampling over vocabularies", sampling.rows, 2),
    Part("notes: tokens per round", tables.notes_tokens, 3),
    Part("notes: speed-up", tables.notes_speedup, 2),
    Part("Leviathan table 1", tables.leviathan_table_1, 1),
    Part("bigram draft", tables.bigram_draft, 1),
    Part("Leviathan T5-XXL", tables.leviathan_t5, 1),
    Part("Leviathan alpha presets", tables.alpha_presets, 2),
    Part("Leviathan lenience", tables.lenience_speeds, 1),
    Part("bounds of a round", tables.rounds_have_bounds, 1),
    Part("best K", tables.optimal_k, 1),
    Part("Chinchilla", systems.chinchilla, 1),
    Part("draft sharding", systems.draft_sharding, 1),
    Part("GPT-2 XL", systems.gpt2, 1),
    Part("Medusa", systems.medusa, 1),
    Part("EAGLE", servers.eagle, 1),
    Part("Llama-4-Maverick", servers.maverick, 2),
    Part("SpecDecode-Bench", servers.specdecode, 1),
    Part("threads", servers.threads, 1),
    Part("the ridge", servers.ridge, 1),
    Part("trees", servers.trees, 1),
    Part("KV cache", cache.rows, 1),
    Part("grid at batch one", tables.whole_grid, 6),
)


def rows(quick: bool = False) -> list[Row]:
    """All rows. *quick* runs a fifth of the requests, with wider intervals."""
    return list(itertools.chain.from_iterable(part.run(quick) for part in PARTS))


def plots(folder: Path) -> list[Path]:
    """Draw the pictures of speculative decoding into *folder*; simulated points over closed forms."""
    return pictures.plots(folder)
