"""From operations and kernels to a `CostModel`: tables over rows, a few multiplications for attention."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.cost import Work
from hwmodels.device import Device
from hwmodels.graphs import padded
from hwmodels.kernels.compressed import work_of_decodes, work_of_prompts
from hwmodels.kernels.ops import ARRAYS, SCALARS, DecodeForm, Ops, PrefillForm
from hwmodels.kernels.protocol import Kernels
from hwmodels.kernels.single import SINGLE, DecodeTimes, PromptTimes
from hwmodels.model import ModelSpec
from hwmodels.operations import QUERY_TILE, AttentionShape, Collective, SharedKv, StageWork
from hwmodels.parallel import ParallelConfig
from hwmodels.precision import precision
from hwmodels.reach import Chunk
from hwmodels.row_table import FloatArray, RowTable
from hwmodels.time_parts import Parts, add_parts, head_parts, layer_parts, no_parts, scaled
from hwmodels.totals import Totals
from hwmodels.work import stage_work


class _Stage:
    """One stage's tables and forms."""

    def __init__(
        self, work: StageWork, spec: ModelSpec, data: int, kernels: Kernels, last: bool, *, parts: bool = False
    ) -> None:
        """*data*: groups of devices that share the rows of a step; *parts*: each has a part of every prompt, not some prompts."""
        self.work, self.kernels = work, kernels
        self.share = 1.0 / data
        self.prompt_share = 1.0 if parts else self.share
        """The share of the prompts, and of the KV that they attend to, that a group has to do with."""
        self.data = data
        captured = kernels.captured or ()
        self.captured = captured
        self.widest_gap = max((b - a for a, b in itertools.pairwise((0, *captured))), default=0) * data
        # Up to so many rows a decode step is a graph's.
        self.replayed = captured[-1] * data if captured else 1 << 62
        host = kernels.host
        self.factors = host.compute_factor, host.bandwidth_factor
        self.prompt_factor = host.prompt_factor
        self.row_s, self.step_s = host.row_s, host.step_s
        self.rows = RowTable(self.stretched(self._rows_s, row_s=host.row_s, prompts=True))
        bare = self.rows
        if self.prompt_factor != 1.0:
            bare = RowTable(self.stretched(self._rows_s, row_s=host.row_s))
            # Prompts whose arithmetic is faster than that of decodes make no step shorter than its decodes.
            self.widest_gap = 1 << 62
        self.bare_rows = bare
        """Iterations of decodes alone, as many rows as there are."""
        self.decode_rows = RowTable(self.stretched(self._padded_rows_s, row_s=host.row_s)) if captured else bare
        self.logits = RowTable(self.stretched(self._logits_s))
        self.has_head = last
        self.encoder = spec.is_encoder
        self.attention = tuple(
            (kernels.prefill_form(shape), _decode_form(kernels, shape, work.shared_kv), shape.windowed)
            for shape in work.attention
        )
        if (heads := work.head_products) is not None:
            absorbed = RowTable(lambda rows: heads.layers * kernels.head_products_s(rows, heads))
            always = any(shape.absorbed for shape in work.attention)
            self.attention += (_by_rows(absorbed if always else RowTable(self._expanded_s), absorbed),)
        if work.recurrence is not None:
            self.attention += ((*kernels.recurrence_forms(work.recurrence), False),)
        compute, bandwidth = self.factors
        if (compute, bandwidth, self.prompt_factor) != (1.0, 1.0, 1.0):
            self.attention = tuple(
                (_times(prefill, compute * self.prompt_factor), _times(decode, bandwidth), windowed)
                for prefill, decode, windowed in self.attention
            )
        if work.shared_kv is not None and work.shared_kv.of_past is not None:
            self.attention += (_gathered(kernels, work.shared_kv.of_decodes, work.shared_kv.of_past),)
        self.single: tuple[PromptTimes | None, DecodeTimes | None] = (None, None)
        """The times of the one form of attention that there is in most models, where no more has to be known than numbers."""
        if len(self.attention) == 1 and data == 1 and not self.encoder and not self.attention[0][2]:
            prefill, decode, _ = self.attention[0]
            self.single = getattr(prefill, SINGLE, None), getattr(decode, SINGLE, None)
        # Each group of data-parallel attention has a scheduler and sampler of its own, beside the others.
        self.sequence_s = host.sequence_s * self.prompt_share
        self.prompt_floor_s, self.decode_floor_s = host.prompt_floor_s, host.decode_floor_s
        self.launch_floor_s = host.launch_floor_s
        # vLLM replays a prompt of which one token is left as a decode (0.32.0, v1/worker/gpu_model_runner.py, _is_uniform_decode).
        self.decode_tokens = host.decode_tokens

    def _collectives_s(self, rows: FloatArray, of_logits: bool) -> FloatArray:
        total = np.zeros_like(rows)
        for op in self.work.collectives:
            if op.of_logits == of_logits:
                total = total + op.layers * self.kernels.collective_s(op.kind, rows * op.bytes_per_row, op.n)
        return total

    def _rows_s(self, rows: FloatArray) -> FloatArray:
        own = np.ceil(rows * self.share)
        return self._own_rows_s(own) + own * self.row_s + self.experts_s(rows) + self.exchange_s(rows)

    def _padded_rows_s(self, rows: FloatArray) -> FloatArray:
        """The time of the padded rows of a decode step: dense layers and exchange have as many rows as the graph, host and experts
        those there are."""
        own = np.ceil(rows * self.share)
        fuller = padded(self.captured, own)
        sent = np.where(fuller > own, fuller * self.data, rows)
        return self._own_rows_s(fuller) + own * self.row_s + self.experts_s(rows) + self.exchange_s(sent)

    def _own_rows_s(self, own: FloatArray) -> FloatArray:
        total = self._collectives_s(own, False)
        for op in self.work.linears:
            if not op.of_logits and not op.of_prompts:
                total = total + op.layers * self.kernels.gemm_s(own, op.n, op.k, precision=op.precision)
        return self._with_streams_s(total, own)

    def still_s(self, rows: FloatArray) -> FloatArray:
        """Seconds of the layers' kernels that multiply nothing: those that stream, and those that send."""
        own = np.ceil(rows * self.share)
        return self._with_streams_s(self._collectives_s(own, False), own) + self.exchange_s(rows)

    def _with_streams_s(self, total: FloatArray, own: FloatArray) -> FloatArray:
        """*total* seconds and those of the kernels that stream."""
        for stream in self.work.elementwise:
            size_bytes = own * stream.bytes_per_row
            total = total + stream.layers * self.kernels.elementwise_s(size_bytes, stream.launches, stream.op)
        return total

    def _expanded_s(self, rows: FloatArray) -> FloatArray:
        """Products of prompts alone."""
        total = np.zeros_like(rows)
        for op in self.work.linears:
            if op.of_prompts:
                total = total + op.layers * self.kernels.gemm_s(rows, op.n, op.k, precision=op.precision)
        return total

    def experts_s(self, rows: FloatArray) -> FloatArray:
        experts = self.work.experts
        return np.zeros_like(rows) if experts is None else experts.layers * self.kernels.moe_s(rows, experts)

    def exchange_s(self, rows: FloatArray) -> FloatArray:
        exchange = self.work.exchange
        return np.zeros_like(rows) if exchange is None else exchange.layers * self.kernels.exchange_s(rows, exchange)

    def _logits_s(self, rows: FloatArray) -> FloatArray:
        own = np.ceil(rows * self.share)
        total = self._collectives_s(own, True) + self.kernels.sample_s(own)
        for op in self.work.linears:
            if op.of_logits:
                total = total + op.layers * self.kernels.gemm_s(own, op.n, op.k, precision=op.precision)
        return total

    def stretched(
        self, kernels_s: Callable[[FloatArray], FloatArray], *, row_s: float = 0.0, prompts: bool = False
    ) -> Callable[[FloatArray], FloatArray]:
        """Times by rows with what they take for one row as reading, and what they take more as arithmetic, each so many times as
        long; *row_s* of each row is the host's, and stays. *prompts*: of iterations that compute some.

        Both parts grow with the rows, so that their sum does, whatever the factors. Experts that more tokens wake are read from
        memory too, and count as arithmetic here.
        """
        compute, bandwidth = self.factors
        if prompts:
            compute *= self.prompt_factor
        if compute == bandwidth == 1.0:
            return kernels_s

        def device_s(rows: FloatArray) -> FloatArray:
            return kernels_s(rows) - np.ceil(rows * self.share) * row_s

        least_s = float(device_s(np.ones(1))[0])

        def stretched(rows: FloatArray) -> FloatArray:
            own = device_s(rows)
            host = np.ceil(rows * self.share) * row_s
            return host + bandwidth * np.minimum(own, least_s) + compute * np.maximum(own - least_s, 0.0)

        return stretched

    def scalar(self, totals: Totals) -> float:
        rows: int
        prompt: int
        chunks: int
        seqs: int
        logits: int
        rows, prompt, chunks, pairs, prompt_kv, seqs, kv, logits, _, _ = totals
        own = (seqs + chunks) * self.sequence_s + self.step_s
        floor = self.prompt_floor_s if prompt > chunks * self.decode_tokens else self.decode_floor_s
        # A look at the table, inline: this runs once an iteration.
        table = self.rows if prompt else self.decode_rows
        exact = table.exact
        seconds = exact[rows] if 0 <= rows < len(exact) else table.scalar(rows)
        if 0 < prompt < self.widest_gap:
            # Decodes beside a few prompt tokens take no less than they would alone; beside many they cannot.
            alone = self.decode_rows.scalar(rows - prompt)
            seconds = alone if alone > seconds else seconds
        if self.has_head and logits:
            exact = self.logits.exact
            seconds += exact[logits] if 0 <= logits < len(exact) else self.logits.scalar(logits)
        prefill_s, decode_s = self.single
        if prefill_s is not None and decode_s is not None:
            if prompt:
                seconds += prefill_s.seconds(prompt, chunks, pairs, prompt_kv)
            if seqs:
                seconds += decode_s.seconds(seqs, rows - prompt, kv, kv)
        else:
            seconds = self._with_attention(seconds, totals)
        if rows - prompt > self.replayed:
            floor = self.launch_floor_s
        return (seconds if seconds > floor else floor) + own

    def _with_attention(self, seconds: float, totals: Totals) -> float:
        """*seconds* and those of all forms of attention."""
        rows, prompt, chunks, pairs, prompt_kv, seqs, kv, _, pairs_window, kv_window = totals
        if self.data > 1:
            f, g = self.share, self.prompt_share
            prompt_f, chunks, pairs, prompt_kv = prompt * f, chunks * g, pairs * f, prompt_kv * g
            pairs_window, seqs_f, queries = pairs_window * f, seqs * f, (rows - prompt) * f
            kv, kv_window = kv * f, kv_window * f
        else:
            prompt_f, seqs_f, queries = prompt, seqs, rows - prompt
        if self.encoder:
            pairs = 2 * pairs - prompt_f
        if prompt:
            for prefill, _, windowed in self.attention:
                if windowed:
                    seconds += prefill(SCALARS, prompt_f, chunks, pairs_window, prompt_kv, pairs - pairs_window)
                else:
                    seconds += prefill(SCALARS, prompt_f, chunks, pairs, prompt_kv)
        if seqs:
            for _, decode, windowed in self.attention:
                if windowed:
                    seconds += decode(SCALARS, seqs_f, queries, kv_window, kv - kv_window)
                else:
                    seconds += decode(SCALARS, seqs_f, queries, kv)
        return seconds

    def array(self, totals: Totals) -> FloatArray:
        columns: Sequence[Any] = totals
        shape = totals.rows.shape if isinstance(totals.rows, np.ndarray) else None
        if not all(isinstance(c, np.ndarray) and c.dtype == np.int64 and c.shape == shape for c in totals):
            columns = np.broadcast_arrays(*(np.asarray(c, dtype=np.int64) for c in totals))
        rows, prompt, chunks, _, _, seqs, _, logits, _, _ = columns
        own = (seqs + chunks) * self.sequence_s + self.step_s
        floor = self._floor_s(rows - prompt, prompt > chunks * self.decode_tokens)
        seconds = self._table_s(rows, rows - prompt, prompt > 0)
        if self.has_head:
            seconds = seconds + self.logits.array(logits)
        for _, one in self._attention_s(columns):
            seconds = seconds + one
        return np.maximum(seconds, floor) + own

    def _attention_s(self, columns: Sequence[Any]) -> Iterator[tuple[str, FloatArray]]:
        """Seconds of each form of attention in iterations of these totals, and the part of their time that it is: zero where
        nothing of a kind runs."""
        rows, prompt, chunks, pairs, prompt_kv, seqs, kv, _, pairs_window, kv_window = columns
        some_prompt, some_decode, queries = prompt > 0, seqs > 0, rows - prompt
        if self.data > 1:
            f, g = self.share, self.prompt_share
            prompt, chunks, pairs, prompt_kv = prompt * f, chunks * g, pairs * f, prompt_kv * g
            pairs_window, seqs, queries = pairs_window * f, seqs * f, queries * f
            kv, kv_window = kv * f, kv_window * f
        if self.encoder:
            pairs = 2 * pairs - prompt
        # Where nothing of a kind runs, one stands in for zero so that no division fails; the result is not used.
        if some_prompt.any():
            rows_1, chunks_1 = np.where(some_prompt, prompt, 1), np.where(some_prompt, chunks, 1)
            for prefill, _, windowed in self.attention:
                of_pairs = (pairs_window, prompt_kv, pairs - pairs_window) if windowed else (pairs, prompt_kv)
                one = prefill(ARRAYS, rows_1, chunks_1, *of_pairs)
                yield "prompt_attention", np.where(some_prompt, one, 0.0)
        if some_decode.any():
            seqs_1 = np.where(some_decode, seqs, 1)
            for _, decode, windowed in self.attention:
                one = decode(ARRAYS, seqs_1, queries, *((kv_window, kv - kv_window) if windowed else (kv,)))
                yield "kv", np.where(some_decode, one, 0.0)

    def parts_s(self, totals: Totals) -> Parts:
        """`array` divided by what the time is spent on (`hwmodels.time_parts`). Totals of int64 arrays of one shape."""
        rows, prompt = totals.rows, totals.prefill_rows
        found = no_parts(rows.shape)
        some_prompt = prompt > 0
        bare_s = np.where(some_prompt, self.rows.array(rows), self.bare_rows.array(rows))
        found["padding"] += self._table_s(rows, rows - prompt, some_prompt) - bare_s
        host_s = np.minimum(np.ceil(rows * self.share) * self.row_s, bare_s)
        found["host"] += host_s
        layers = self._by_factors(
            lambda each: layer_parts(
                self.work, self.kernels, each, self.share, lambda some: (self.experts_s(some), self.exchange_s(some))
            ),
            rows,
            np.where(some_prompt, self.prompt_factor, 1.0),
        )
        add_parts(found, scaled(layers, bare_s - host_s))
        if self.has_head:
            logits = totals.logit_rows
            head = self._by_factors(lambda each: head_parts(self.work, self.kernels, each, self.share), logits)
            add_parts(found, scaled(head, self.logits.array(logits)))
        for part, seconds in self._attention_s(totals):
            found[part] += seconds
        # Where a module that was timed whole is shorter than its products launch by launch, its graph hides their starts.
        found["arithmetic"] += np.minimum(found["kv"], 0.0)
        found["kv"] = np.maximum(found["kv"], 0.0)
        # What is left is the host's: its work of a step, and a floor of launches that kernels do not reach.
        found["host"] += self.array(totals) - sum(found.values())
        return found

    def _by_factors(
        self, parts: Callable[[NDArray[np.int64]], Parts], rows: NDArray[np.int64], arithmetic: FloatArray | float = 1.0
    ) -> Parts:
        """*parts* of *rows* with the factors of `stretched`, part by part, and another on *arithmetic*."""
        if self.factors == (1.0, 1.0) and np.all(arithmetic == 1.0):
            return parts(rows)
        compute, bandwidth = arithmetic * self.factors[0], self.factors[1]
        least = parts(np.ones(1, np.int64))
        return {
            name: bandwidth * np.minimum(each, least[name]) + compute * np.maximum(each - least[name], 0.0)
            for name, each in parts(rows).items()
        }

    def _table_s(
        self, rows: NDArray[np.int64], decodes: NDArray[np.int64], some_prompt: NDArray[np.bool_]
    ) -> FloatArray:
        if self.decode_rows is self.rows:
            return self.rows.array(rows)
        alone = self.decode_rows.array(decodes)
        return np.where(some_prompt, np.maximum(self.rows.array(rows), alone), alone) if some_prompt.any() else alone

    def _floor_s(self, decodes: NDArray[np.int64], prompts: NDArray[np.bool_]) -> FloatArray:
        """Least seconds of the kernels of each iteration: *decodes* are its query tokens of decodes over all groups, *prompts* says
        whether it has prompts that do not run as decodes."""
        of_graphs = np.where(prompts, self.prompt_floor_s, self.decode_floor_s)
        return np.where(decodes > self.replayed, self.launch_floor_s, of_graphs)


def _decode_form(kernels: Kernels, shape: AttentionShape, shared: SharedKv | None) -> DecodeForm:
    """The form of decodes, which attend to a part of the KV with the query heads of all devices that *shared* says."""
    if shared is None:
        return kernels.decode_form(shape)
    whole = kernels.decode_form(replace(shape, n_heads=shape.n_heads * shared.n))

    def decode(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
        return whole(ops, seqs, queries, shared.tokens(seqs, kv))

    return decode


def _gathered(
    kernels: Kernels, of_decodes: Sequence[Collective], of_past: Collective
) -> tuple[PrefillForm, DecodeForm, bool]:
    """Forms of what prompts gather of their past, and of what decodes send."""

    def sent_s(rows: FloatArray) -> FloatArray:
        times = [op.layers * kernels.collective_s(op.kind, rows * op.bytes_per_row, op.n) for op in of_decodes]
        return np.sum(times, axis=0)

    def prefill(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
        past = np.asarray(ops.maximum(kv - rows, 0), float)
        one = kernels.collective_s(of_past.kind, past * of_past.bytes_per_row, of_past.n)
        seconds = np.where(past > 0, of_past.layers * one, 0.0)
        return seconds if ops is ARRAYS else float(seconds)

    none = RowTable(np.zeros_like)
    return prefill, _by_rows(none, RowTable(sent_s))[1], False


def _times(form: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def scaled(*args: Any) -> Any:
        return form(*args) * factor

    return scaled


def _by_rows(prompts: RowTable, decodes: RowTable) -> tuple[PrefillForm, DecodeForm, bool]:
    """Forms of what depends on the prompt rows, or on the query rows of decodes, alone."""

    def seconds(ops: Ops, table: RowTable, rows: Any) -> Any:
        # Shares of rows that ranks have in the mean are rounded up, as whole rows are computed.
        return table.array(np.ceil(rows).astype(np.int64)) if ops is ARRAYS else table.scalar(math.ceil(rows))

    def prefill(ops: Ops, rows: Any, chunks: Any, pairs: Any, kv: Any) -> Any:
        return seconds(ops, prompts, rows)

    def decode(ops: Ops, seqs: Any, queries: Any, kv: Any) -> Any:
        return seconds(ops, decodes, queries)

    return prefill, decode, False


class _Ranks:
    """A stage under data-parallel attention, rank by rank: each rank's own part, and what all of them do together."""

    def __init__(self, stage: _Stage, spec: ModelSpec, kernels: Kernels) -> None:
        # Priced as a stage of its own, without experts and floors, which hold for the whole.
        self._own = _Stage(replace(stage.work, experts=None, exchange=None), spec, 1, kernels, stage.has_head)
        own = self._own
        self._floors = own.prompt_floor_s, own.decode_floor_s, own.launch_floor_s
        self._replayed = own.replayed
        own.prompt_floor_s = own.decode_floor_s = own.launch_floor_s = 0.0
        # What cannot be exchanged so is said here, and not at the first step.
        stage.exchange_s(np.ones(1))
        self._pads = kernels.pads_ranks
        self._experts = RowTable(stage.stretched(stage.experts_s, prompts=True))
        self._alone = RowTable(stage.stretched(stage.experts_s)) if stage.prompt_factor != 1.0 else None
        """Experts in steps without prompts, where their arithmetic is another."""
        self._exchange = RowTable(stage.exchange_s)

    def _graph(self, rows: int) -> int:
        sizes = self._own.captured
        return sizes[bisect_left(sizes, rows)] if sizes and 0 < rows <= sizes[-1] else rows

    def scalar(self, ranks: Sequence[Totals]) -> float:
        own = self._own
        rows = prompt = fullest = 0
        slowest = floor = 0.0
        for totals in ranks:
            rows += totals[0]
            prompt += totals[1]
            fullest = max(fullest, totals[0] - totals[1])
            slowest = max(slowest, own.scalar(totals))
            host = (totals[5] + totals[2]) * own.sequence_s + own.step_s
            beyond = totals[0] - totals[1] > self._replayed
            prompts = totals[1] > totals[2] * own.decode_tokens
            floor = max(floor, self._floors[2 if beyond else 0 if prompts else 1] + host)
        sent = prompt + len(ranks) * self._graph(fullest) if self._pads else rows
        experts_s = self._experts.scalar(rows)
        if self._alone is not None:
            alone_s = self._alone.scalar(rows - prompt)
            experts_s = max(experts_s, alone_s) if prompt else alone_s
        return max(slowest + (experts_s + self._exchange.scalar(sent)), floor)

    def array(self, ranks: Sequence[Totals]) -> FloatArray:
        own = self._own
        shape = np.broadcast_shapes(*(np.shape(column) for totals in ranks for column in totals))
        rows, prompt, fullest = (np.zeros(shape, np.int64) for _ in range(3))
        slowest, floor = np.zeros(shape), np.zeros(shape)
        for some in ranks:
            totals = Totals(*(np.broadcast_to(np.asarray(column, np.int64), shape) for column in some))
            rows, prompt = rows + totals.rows, prompt + totals.prefill_rows
            fullest = np.maximum(fullest, totals.rows - totals.prefill_rows)
            slowest = np.maximum(slowest, own.array(totals))
            host = (totals.decode_seqs + totals.prefill_chunks) * own.sequence_s + own.step_s
            prompts = totals.prefill_rows > totals.prefill_chunks * own.decode_tokens
            least = np.where(prompts, self._floors[0], self._floors[1])
            beyond = totals.rows - totals.prefill_rows > self._replayed
            floor = np.maximum(floor, np.where(beyond, self._floors[2], least) + host)
        sent = prompt + len(ranks) * padded(own.captured, fullest) if self._pads else rows
        experts_s = self._experts.array(rows)
        if self._alone is not None:
            alone_s = self._alone.array(rows - prompt)
            experts_s = np.where(prompt > 0, np.maximum(experts_s, alone_s), alone_s)
        return np.maximum(slowest + (experts_s + self._exchange.array(sent)), floor)


class LayerwiseCost:
    """`CostModel` that adds up a model's operations, priced by *kernels*.

    Scalars take about a microsecond; tables grow with the rows that are asked for. Each field of the totals must be a
    non-negative int, or all int64 arrays.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parallel: ParallelConfig,
        kernels: Kernels,
        *,
        peak_flops_per_s: float,
        peak_bytes_per_s: float,
        devices_per_node: int,
        kv_precision: str | None = None,
    ) -> None:
        """*peak_flops_per_s* and *peak_bytes_per_s* are those of one device."""
        self.spec, self.parallel, self.kernels = spec, parallel, kernels
        self._settings = (peak_flops_per_s, peak_bytes_per_s, devices_per_node, kv_precision)
        self.n_stages = parallel.pipeline
        window = spec.window_tokens
        self.window_tokens = Chunk(window) if spec.is_chunked and window is not None else window
        self.peak_flops_per_s = peak_flops_per_s * parallel.n_devices
        self.peak_bytes_per_s = peak_bytes_per_s * parallel.n_devices
        self._between_nodes = parallel.n_devices > devices_per_node
        self._stages = tuple(
            _Stage(
                stage_work(spec, parallel, s, kv_precision=kv_precision),
                spec,
                parallel.groups,
                kernels,
                s == self.n_stages - 1,
                parts=parallel.prefill_context > 1,
            )
            for s in range(self.n_stages)
        )
        self._scalar = tuple(stage.scalar for stage in self._stages)
        self._ranks = tuple(_Ranks(stage, spec, kernels) for stage in self._stages) if parallel.data > 1 else ()
        self.scalar_s = self._scalar[0]
        """`iteration_s` of the first stage for totals that are known to be ints."""
        self._handover_bytes = spec.hidden * precision(spec.base_precision).element_bytes / parallel.groups
        self._handover = RowTable(
            lambda rows: np.asarray(kernels.send_s(rows * self._handover_bytes, self._between_nodes))
        )
        self._expert_bytes = RowTable(self._expert_bytes_of)
        fills_tiles = any(self._pairs(stage.work, 1.0) is not None for stage in self._stages)
        self._expert_tiles = RowTable(self._multiplied_by_experts) if fills_tiles else None
        self._still = RowTable(self._still_s)
        self._work_terms = self._linear_work()
        self._tiles = self._query_tiles()
        self._compressed = [
            shape for stage in self._stages for shape in stage.work.attention if shape.kind == "compressed"
        ]

    @property
    def work_by_stage(self) -> tuple[StageWork, ...]:
        """The operations that are priced, stage by stage."""
        return tuple(stage.work for stage in self._stages)

    @classmethod
    def on(
        cls,
        device: Device,
        spec: ModelSpec,
        parallel: ParallelConfig,
        kernels: Kernels,
        *,
        kv_precision: str | None = None,
    ) -> LayerwiseCost:
        """With the peaks of *device*; ValueError if it lacks the arithmetic of the model's MLPs."""
        return cls(
            spec,
            parallel,
            kernels,
            peak_flops_per_s=device.peak_of(spec.mlp_precision),
            peak_bytes_per_s=device.hbm_bytes_per_s,
            devices_per_node=device.devices_per_node,
            kv_precision=kv_precision,
        )

    def priced_by(self, kernels: Kernels) -> LayerwiseCost:
        """The same deployment with its operations priced by other *kernels*."""
        return self.__reduce__()[0](self.spec, self.parallel, kernels)

    # Tables and closures follow from these values, so they alone are compared, printed and pickled.
    def _key(self) -> tuple[Any, ...]:
        return (self.spec, self.parallel, self.kernels, *self._settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerwiseCost) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"LayerwiseCost({self.spec.name} by {type(self.kernels).__name__}, {self.parallel})"

    def __reduce__(self) -> tuple[Any, ...]:
        peak_flops_per_s, peak_bytes_per_s, devices_per_node, kv_precision = self._settings
        make = functools.partial(
            LayerwiseCost,
            peak_flops_per_s=peak_flops_per_s,
            peak_bytes_per_s=peak_bytes_per_s,
            devices_per_node=devices_per_node,
            kv_precision=kv_precision,
        )
        return make, (self.spec, self.parallel, self.kernels)

    def iteration_s(self, totals: Totals, stage: int = 0, /) -> Any:
        """Seconds of one stage: a float for int totals, float64 arrays for int64 arrays, equal bit for bit."""
        if type(totals[0]) is int:
            return self._scalar[stage](totals)
        if isinstance(totals[0], np.ndarray):
            return self._stages[stage].array(totals)
        return self._scalar[stage](Totals(*(int(x) for x in totals)))

    def parts_s(self, totals: Totals, /) -> Parts:
        """Seconds of all stages by what they are spent on (`hwmodels.time_parts.PARTS`), for totals of int64 arrays of one shape.

        Without a pipeline they add up to `iteration_s`; with one, to the stages' times and the hand-overs between them.
        """
        found = no_parts(totals.rows.shape)
        for stage in self._stages:
            add_parts(found, stage.parts_s(totals))
        found["collectives"] += (self.n_stages - 1) * self._handover.array(totals.rows)
        return found

    def common_step(self, ranks: Sequence[Totals], stage: int = 0, /) -> Any:
        """Seconds of one stage in the step that all ranks of data-parallel attention take together.

        *ranks*: what each of `parallel.data` attention groups computes, none of which need be equal; all ints, or int64 arrays
        that broadcast, equal bit for bit. Attention, dense layers, head and host work are those of the slowest rank; experts
        and the exchange of rows with them are of all ranks' tokens. Where a graph is replayed on all ranks, rows are exchanged
        as if each had as many decodes as the fullest. ValueError where there is not one Totals for each rank.
        """
        if len(ranks) != self.parallel.data:
            raise ValueError(f"a common step takes one Totals for each of {self.parallel.data} ranks; got {len(ranks)}")
        if len(ranks) == 1:
            return self.iteration_s(ranks[0], stage)
        if all(type(column) is int for totals in ranks for column in totals):
            return self._ranks[stage].scalar(ranks)
        if any(isinstance(column, np.ndarray) for totals in ranks for column in totals):
            return self._ranks[stage].array(ranks)
        return self._ranks[stage].scalar([Totals(*(int(column) for column in totals)) for totals in ranks])

    def handover_s(self, rows: Any, /) -> Any:
        """Seconds to pass the activations of *rows* to the next stage; by network where a replica spans nodes."""
        if isinstance(rows, np.ndarray):
            return self._handover.array(rows)
        return self._handover.scalar(int(rows))

    def _expert_bytes_of(self, rows: FloatArray) -> FloatArray:
        total = np.zeros_like(rows)
        for stage in self._stages:
            if stage.work.experts is not None:
                experts, split = stage.work.experts, self.parallel.expert_tensor
                total = total + experts.active_experts(rows) * (experts.expert_bytes * experts.layers * split)
        return total

    def _pairs(self, work: StageWork, rows: Any) -> Any:
        """The kernels' `multiplied_pairs`; None where they multiply no others than there are."""
        multiplied = getattr(self.kernels, "multiplied_pairs", None)
        return None if multiplied is None or work.experts is None else multiplied(rows, work.experts)

    def _multiplied_by_experts(self, rows: FloatArray) -> FloatArray:
        """FLOPs of the experts over all devices, rows that only fill tiles among them."""
        total = np.zeros_like(rows)
        for stage in self._stages:
            pairs, experts = self._pairs(stage.work, rows), stage.work.experts
            if pairs is not None and experts is not None:
                tokens = pairs * (experts.expert / experts.per_token)
                total = total + experts.flops_of_all(tokens) * self.parallel.expert_tensor
        return total

    def _still_s(self, rows: FloatArray) -> FloatArray:
        """Seconds of each device for kernels that multiply nothing, the mean over stages."""
        total = np.zeros_like(rows)
        for stage in self._stages:
            total = total + stage.still_s(rows)
        return total / self.n_stages

    def _query_tiles(self) -> tuple[tuple[bool, float, float], ...]:
        """By shapes of softmax attention of decodes: whether their layers are windowed, query tokens that fill a tile, and FLOPs of
        one query token and one KV token over all devices."""
        found: dict[tuple[bool, float], float] = {}
        for stage in self._stages:
            for shape in stage.work.attention:
                if shape.kind not in ("gqa", "mla"):
                    continue
                heads = shape.n_heads * self.parallel.decode_context / (shape.n_kv_heads if shape.kind == "gqa" else 1)
                key = shape.windowed, QUERY_TILE / heads
                found[key] = found.get(key, 0.0) + shape.decode_flops_per_pair * shape.layers * self.parallel.tensor
        return tuple((windowed, tokens, flops) for (windowed, tokens), flops in found.items() if tokens > 1)

    def _linear_work(self) -> dict[str, float]:
        """Coefficients of FLOPs and bytes over all devices, so that `work` is a dozen multiplications."""
        t, d = self.parallel.tensor, self.parallel.groups
        terms: dict[str, float] = dict.fromkeys(
            (
                "row_flops", "logit_flops", "row_bytes", "logit_bytes", "pair_flops", "window_pair_flops", "past_flops",
                "query_flops", "window_query_flops", "kv_bytes", "window_kv_bytes", "sequence_bytes", "expert_flops",
            ),
            0.0,
        )  # fmt: skip
        for stage in self._stages:
            for op in stage.work.linears:
                kind = "logit" if op.of_logits else "row"
                terms[f"{kind}_flops"] += op.flops(1) * t
                terms[f"{kind}_bytes"] += op.weight_bytes * t * d
            if stage.work.experts is not None:
                each = stage.work.experts.flops_of_all(1) * self.parallel.expert_tensor
                terms["row_flops"] += each
                terms["expert_flops"] += each
            for shape in stage.work.attention:
                if shape.kind == "compressed":
                    continue
                prefix, n = ("window_" if shape.windowed else ""), shape.layers * t
                terms[f"{prefix}pair_flops"] += shape.prefill_flops_per_pair * n
                terms["past_flops"] += shape.expand_flops * n
                terms[f"{prefix}query_flops"] += shape.decode_flops_per_pair * n
                terms[f"{prefix}kv_bytes"] += shape.kv_bytes * n / self.parallel.decode_context
            if stage.work.recurrence is not None:
                terms["row_flops"] += stage.work.recurrence.flops_per_row * t
                terms["sequence_bytes"] += stage.work.recurrence.bytes_per_sequence * t
        return terms

    def work(self, totals: Totals, /) -> Work:
        """FLOPs and memory bytes of one iteration over all stages and devices, counted as `hwmodels.work` says.

        With speculative decoding the query-key pairs of a decode are its KV tokens times its query tokens.
        """
        w = self._work_terms
        columns: Sequence[Any]
        experts: Any
        multiplied: Any
        still: Any
        if isinstance(totals[0], np.ndarray):
            columns = np.broadcast_arrays(*(np.asarray(c, dtype=np.int64) for c in totals))
            some = columns[0] > 0
            experts = self._expert_bytes.array(columns[0])
            still = self._still.array(columns[0])
            multiplied = None if self._expert_tiles is None else self._expert_tiles.array(columns[0])
            ops: Ops = ARRAYS
            some_logits = columns[7] > 0
            seqs_1 = np.maximum(columns[5], 1)
        else:
            columns = tuple(int(c) for c in totals)
            some, some_logits = columns[0] > 0, columns[7] > 0
            experts = self._expert_bytes.scalar(columns[0])
            still = self._still.scalar(columns[0])
            multiplied = None if self._expert_tiles is None else self._expert_tiles.scalar(columns[0])
            ops = SCALARS
            seqs_1 = max(columns[5], 1)
        rows, prompt, chunks, pairs, prompt_kv, seqs, kv, logits, pairs_window, kv_window = columns
        if self.spec.is_encoder:
            pairs = 2 * pairs - prompt
        window = self.window_tokens
        prompt_kv_window = ops.minimum(prompt_kv, chunks * window + prompt) if window else 0
        queries = (rows - prompt) / seqs_1
        flops = (
            rows * w["row_flops"]
            + logits * w["logit_flops"]
            + pairs * w["pair_flops"]
            + pairs_window * w["window_pair_flops"]
            + ops.maximum(prompt_kv - prompt, 0) * w["past_flops"]
            + queries * kv * w["query_flops"]
            + queries * kv_window * w["window_query_flops"]
        )
        hbm_bytes = (
            some * w["row_bytes"]
            + some_logits * w["logit_bytes"]
            + experts
            + (prompt_kv + kv) * w["kv_bytes"]
            + (prompt_kv_window + kv_window) * w["window_kv_bytes"]
            + (seqs + chunks) * w["sequence_bytes"]
        )
        for shape in self._compressed:
            prompts = work_of_prompts(shape, ops, ops.maximum(prompt, 1), chunks, pairs, prompt_kv)
            decodes = work_of_decodes(shape, ops, seqs_1, rows - prompt, kv)
            copies = shape.layers * self.parallel.tensor
            flops = flops + (prompts[0] * (pairs > 0) + decodes[0]) * copies
            hbm_bytes = hbm_bytes + (prompts[1] + decodes[1]) * copies
        tile_flops = 0.0 if multiplied is None else ops.maximum(multiplied - rows * w["expert_flops"], 0.0)
        for windowed, tokens, each in self._tiles:
            tile_flops = tile_flops + ops.maximum(tokens - queries, 0) * (kv_window if windowed else kv) * each
        return Work(flops, hbm_bytes, tile_flops, still)
