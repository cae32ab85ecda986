"""The operations of one pipeline stage on one device: shapes, arithmetic and memory traffic.

Counting rules, here and wherever this project states FLOPs or bytes:

* A multiply-add is two FLOPs. Norms, activations, rotary embeddings and softmax are not counted as FLOPs.
* Memory traffic is weights and KV cache. Activations are taken to stay on the chip between operations; what a kernel
  set charges for them it does through `Elementwise`.
* The cache entry of a new token is written once and not read back in the same iteration, so that attention's traffic
  is the KV tokens of the totals, no more: their cached part read, their new part written.
* What every device of a group repeats (routers, the projections into latents, the indexer of sparse attention, KV heads beyond
  their number) counts on each: it is arithmetic and traffic that the devices do.
* Of E experts, m tokens that each choose k of them uniformly visit E (1 - (1 - k/E)^m) on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.experts import ExpertLoad
from hwmodels.model import Rule
from hwmodels.precision import precision

HEAD_TILE = 64
"""Query heads that kernels of latent attention to chosen tokens multiply together, filled or not (FlashMLA's sparse prefill)."""
QUERY_TILE = 64
"""Rows of queries, heads of a KV head times tokens, that kernels of decode attention multiply together, filled or not: the block of
FlashAttention-2's split decodes and of FlashMLA, and the least that a warp group of Hopper multiplies (PTX ISA, wgmma: m64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`rows x k` times `k x n` in each of `layers` layers, on one device.

    `of_logits`: its rows are the logit rows; `of_prompts`: the prompt rows alone.
    """

    name: str
    n: int
    k: int
    precision: str
    layers: int = 1
    of_logits: bool = False
    of_prompts: bool = False

    def flops(self, rows: Any) -> Any:
        """The operations of all its layers."""
        return rows * (2.0 * self.n * self.k * self.layers)

    @property
    def weight_bytes(self) -> float:
        """The bytes of all its layers' weights."""
        return self.n * self.k * self.layers * precision(self.precision).weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp:
    """The routed experts of `layers` layers: `n_experts / expert` on a device, each `ffn` wide after its split."""

    name: str
    hidden: int
    ffn: int
    n_experts: int
    """Over all devices."""
    per_token: int
    expert: int
    """Groups of devices with different experts."""
    precision: str
    gated: bool = True
    """Three matrices an expert, two without."""
    layers: int = 1
    load: ExpertLoad | None = None
    """The experts' popularities and places; None: as the tables of kernels were measured, even where there are none."""
    redundant: int = 0
    """Copies beside one of each, over all devices."""
    backend: str | None = None
    """The implementation that was asked for; None: the one that was timed."""

    @property
    def busiest_share(self) -> float:
        """The share of all (token, expert) pairs that falls to the busiest device in the mean."""
        return 1.0 / self.expert if self.load is None else float(self.load.rank_slots.max()) / self.per_token

    def active_experts(self, rows: Any) -> Any:
        """Expected experts that at least one of *rows* tokens visits, over all devices, copies counted each."""
        if self.load is None:
            return expected_active_experts(rows, self.n_experts, self.per_token)
        return self.load.awake(rows).sum(axis=-1)

    def flops_of_all(self, rows: Any) -> Any:
        """Over all groups of devices with different experts: on one device of each, all its layers."""
        return rows * (2.0 * self._matrices * self.per_token * self.hidden * self.ffn * self.layers)

    def flops(self, rows: Any) -> Any:
        """The operations on the busiest device, of all its layers."""
        share = self.per_token * self.busiest_share
        return rows * (2.0 * self._matrices * share * self.hidden * self.ffn * self.layers)

    def read_bytes(self, rows: Any) -> Any:
        """Weights of the experts that *rows* tokens are expected to visit, on the busiest device, all layers."""
        if self.load is None:
            return self.active_experts(rows) * (self.expert_bytes * self.layers / self.expert)
        return self.load.awake(rows).max(axis=-1) * (self.expert_bytes * self.layers)

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert on one device in one layer."""
        return self._matrices * self.hidden * self.ffn * precision(self.precision).weight_bytes

    @property
    def _matrices(self) -> float:
        return 3.0 if self.gated else 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention of `layers` layers on one device; `kind` is gqa, mla, indexer or compressed.

    `windowed` layers count the window totals. For `mla` prefill multiplies expanded heads (`qk_dim`, `v_dim`) and
    decode the latent (`latent_dim` + `rope_dim`), except where `absorbed` says that prefill does so too.
    """

    kind: str
    n_heads: int
    n_kv_heads: int
    qk_dim: int
    v_dim: int
    kv_bytes: float
    """Cached bytes of one token in one layer on one device."""
    precision: str
    """The format of the arithmetic."""
    layers: int = 1
    windowed: bool = False
    window_tokens: int | None = None
    latent_dim: int = 0
    rope_dim: int = 0
    absorbed: bool = False
    expand_flops: float = 0.0
    """The operations that expand one cached latent of the past into keys and values (`mla` prefill with a past), one layer."""
    module: str = ""
    """The module that was timed (`compressed`): csa, hca, msa or dsa."""
    compress: int = 0
    """Tokens that a key stands for beside the last `near`, which are keys themselves (`compressed`); 0: there are no others."""
    near: float = 0
    chosen: int = 0
    """The number of those keys that a query attends to, scored in `index_flops` each; 0: to all of them."""
    index_flops: float = 0.0
    entry_bytes: float = 0.0
    """Cached bytes of one key."""
    multiplied_heads: int = 0
    """Query heads that tensor cores multiply, where a device's share of a group fills their tile in part; 0: those there are."""
    in_blocks: bool = False
    """The layer's products are of FP8 in blocks."""
    hidden: int = 0
    timed_as: AttentionShape | None = None
    """The shape that was timed in the place of latent attention to chosen tokens: of an indexer its layers whole, and of the
    attention those of its layers, perhaps none, that have no indexer."""

    @property
    def decode_flops_per_pair(self) -> float:
        """The operations of one query token and one KV token, one layer."""
        if self.kind == "mla":
            return 2.0 * self.n_heads * (2 * self.latent_dim + self.rope_dim)
        return 2.0 * self.n_heads * (self.qk_dim + self.v_dim)

    @property
    def prefill_flops_per_pair(self) -> float:
        if self.absorbed:
            return self.decode_flops_per_pair
        return 2.0 * self.n_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProducts:
    """The products that absorbed latent attention computes head by head: queries into the latent before it, its result out of it
    after.

    Its matrices are those of the product that expands latents, which are counted there.
    """

    heads: int
    """On one device."""
    shapes: tuple[tuple[int, int], ...]
    """The widths (k, n) of a head's matrix in each product."""
    precision: str
    layers: int

    def flops(self, rows: Any) -> Any:
        """The operations of one layer."""
        return rows * (2.0 * self.heads * sum(k * n for k, n in self.shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Kernels of each of `layers` layers that only move activations, on one device."""

    name: str
    bytes_per_row: float
    """Read and written in one layer."""
    launches: int
    """The launches of one layer."""
    layers: int = 1
    op: str = ""
    """The operation whose own measured kernel prices it; empty: one that streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`kind` is all_reduce, all_gather or all_to_all over `n` devices; `bytes_per_row` of one layer's whole tensor."""

    name: str
    kind: str
    bytes_per_row: float
    n: int
    layers: int = 1
    of_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKv:
    """KV of every sequence over `n` devices, `interleave` tokens by turns: each attends to its part with the query heads of all,
    and the parts of the result are joined by their sums of exponentials."""

    n: int
    interleave: int
    of_decodes: tuple[Collective, ...] = ()
    """Collectives of the query tokens of decodes; those of all rows are among a stage's."""
    of_past: Collective | None = None
    """Bytes that prompts gather of each cached token of their past."""

    def tokens(self, seqs: Any, kv: Any) -> Any:
        """Tokens of *seqs* sequences with *kv* tokens together on the device that has the most, in the mean over lengths."""
        return (kv + seqs * (0.5 * self.interleave * (self.n - 1))) / self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Rows that go to the experts of other attention groups and come back, in `layers` layers, over `n` devices."""

    row_bytes: float
    """The bytes of one token's hidden state, in the 16 bits of activations."""
    hidden: int
    n: int
    """Devices: `tensor * data`."""
    tensor: int
    """Devices of an attention group, which hold the same rows and send a share of them each."""
    expert: int
    """Groups of devices with different experts; 1: each device has a slice of every expert."""
    per_token: int
    n_experts: int
    """The number of experts, copies included."""
    load: ExpertLoad
    """The experts' popularities and places."""
    layers: int = 1
    mode: str | None = None
    """One of `hwmodels.experts.EXCHANGES`; None: what the serving stack does unless told otherwise."""
    sent_bytes: float = 2.0
    """The bytes of one number on the way to the experts, where libraries quantise rows before they send them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Linear attention of `layers` layers on one device, heads per device: the short convolution and the update of the state.

    Their projections are `Linear`. A sequence's state is read and written once an iteration, whatever its rows.
    """

    rule: Rule = "delta"
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    state_bytes: float
    """The bytes of one element of the state."""
    conv_bytes: float
    """The bytes of one kept input of the convolution."""
    layers: int

    @property
    def cells(self) -> int:
        """Elements of one sequence's state in one layer."""
        return self.n_value_heads * self.key_dim * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values, which the convolution runs over."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim

    @property
    def flops_per_row(self) -> float:
        """The operations of one token, all layers: read with the key, write the outer product, read with the query (Yang et al.,
        arXiv 2406.06484), two each for a cell, of which Mamba-2 has no read with the key; and a multiply-add for each tap of the
        convolution."""
        by_cell = 4.0 if self.rule == "mamba2" else 6.0
        return (by_cell * self.cells + 2.0 * self.conv_width * self.channels) * self.layers

    @property
    def held_bytes(self) -> float:
        """The bytes that one sequence keeps, all layers: states, and the inputs that the convolutions look back on."""
        kept = self.channels * (self.conv_width - 1) * self.conv_bytes
        return (self.cells * self.state_bytes + kept) * self.layers

    @property
    def bytes_per_sequence(self) -> float:
        """The bytes of one sequence and iteration, all layers: those that it keeps, read and written."""
        return 2.0 * self.held_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Everything one device of one stage does in an iteration."""

    linears: tuple[Linear, ...]
    experts: ExpertMlp | None
    attention: tuple[AttentionShape, ...]
    elementwise: tuple[Elementwise, ...]
    collectives: tuple[Collective, ...]
    recurrence: Recurrence | None
    resident_bytes: float
    """Weights on one device, embedding and biases included."""
    exchange: Exchange | None = None
    """The exchange between the groups of data-parallel attention."""
    head_products: HeadProducts | None = None
    """The products of decodes under latent attention, and of prompts where they are absorbed too."""
    shared_kv: SharedKv | None = None
    """The devices that share the KV of a sequence; None: each has all of its heads'."""


def expected_active_experts(rows: Any, n_experts: int, per_token: int) -> Any:
    """E (1 - (1 - k/E)^rows): experts that *rows* tokens visit when each chooses k of E at random."""
    return n_experts * (1.0 - np.power(1.0 - per_token / n_experts, rows))
