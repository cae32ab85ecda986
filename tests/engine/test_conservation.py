"""Sums that hold in every run."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine import ABORTED, FINISHED, REJECTED, UNFINISHED
from tests.engine.random_runs import an_experiment, ran
from tests.sample import few


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", few(range(0, 120, 20)))
def test_requests_tokens_blocks_and_times_balance(seed: int, speculative: bool) -> None:
    for case in range(seed, seed + 20):
        experiment, columns = an_experiment(case, speculative=speculative), ran(case, speculative=speculative)
        requests, iterations = columns.requests, columns.iterations()
        status = requests["status"]
        finished, rejected, aborted = status == FINISHED, status == REJECTED, status == ABORTED
        assert np.isin(status, (FINISHED, REJECTED, UNFINISHED, ABORTED)).all()
        assert not aborted.any() or (experiment.workload.abort_ns >= 0)[aborted].all()
        if experiment.horizon_ns is None:
            assert not (status == UNFINISHED).any()

        # Tokens: every finished request has all of its own, and iterations emitted what requests received.
        np.testing.assert_array_equal(requests["emitted_tokens"][finished], requests["output_tokens"][finished])
        again = requests["preemptions"] > 0
        assert not requests["emitted_tokens"][rejected & ~again].any()
        assert iterations["emitted_tokens"].sum() == requests["emitted_tokens"].sum()
        if experiment.horizon_ns is None and not (rejected & again).any() and not aborted.any():
            # KV: prompts and decode steps computed what was asked for and what was given up, but for what was found in the prefix
            # cache; the last token is never cached.
            output = requests["output_tokens"]
            asked = np.maximum(requests["prompt_tokens"], 1) + np.maximum(output - 1, 0)
            completions = sum(int(replica.spans["completions"].sum()) for replica in columns.replicas)
            by_completion = completions - int((finished & (output == 0)).sum())
            decoded = requests["emitted_tokens"].sum() - by_completion
            found = sum(
                requests[name].sum() for name in ("prefix_hit_tokens", "prefix_hit_again_tokens") if name in requests
            )
            assert (
                iterations["prefill_tokens"].sum() + decoded + found
                == asked[finished].sum() + requests["recomputed_tokens"].sum()
            )
        gaps, weights = columns.itl()
        assert (gaps >= 0).all()
        if not speculative:
            assert weights.sum() == np.maximum(requests["emitted_tokens"] - 1, 0).sum()

        # Memory stays within the pool.
        total = np.array([tenant.kv_blocks for tenant in experiment.hosted])
        assert (iterations["kv_blocks_used"] <= total[iterations["replica"]]).all()
        assert (iterations["kv_blocks_used"] >= 0).all()

        # Times are ordered.
        assert (requests["scheduled_ns"][finished] >= requests["arrival_ns"][finished]).all()
        emits = finished & (requests["output_tokens"] > 0)
        assert (requests["first_token_ns"][emits] > requests["scheduled_ns"][emits]).all()
        assert (requests["finish_ns"][emits] >= requests["first_token_ns"][emits]).all()
        assert (requests["finish_ns"][~finished] == -1).all()
        for replica, tenant in enumerate(experiment.hosted):
            if tenant.cost.n_stages > 1 or (tenant.micro_batches or 1) > 1:
                continue  # micro-batches overlap
            mine = iterations["replica"] == replica
            start, duration = iterations["start_ns"][mine], iterations["duration_ns"][mine]
            assert (start[1:] >= (start + duration)[:-1]).all()
