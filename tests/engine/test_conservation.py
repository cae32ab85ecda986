"""What must hold in every run."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine import FINISHED, REJECTED, UNFINISHED, run
from tests.engine.test_identity import an_experiment


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("seed", range(0, 120, 40))
def test_requests_tokens_blocks_and_times_balance(seed: int, speculative: bool) -> None:
    for case in range(seed, seed + 40):
        experiment = an_experiment(case, speculative=speculative)
        columns = run(experiment)
        requests, iterations = columns.requests, columns.iterations()
        status = requests["status"]
        finished, rejected = status == FINISHED, status == REJECTED
        assert np.isin(status, (FINISHED, REJECTED, UNFINISHED)).all()
        if experiment.horizon_ns is None:
            assert not (status == UNFINISHED).any()

        # Tokens: every finished request has all of its own, and iterations emitted what requests received.
        np.testing.assert_array_equal(requests["emitted_tokens"][finished], requests["output_tokens"][finished])
        assert not requests["emitted_tokens"][rejected].any()
        assert iterations["emitted_tokens"].sum() == requests["emitted_tokens"].sum()
        if experiment.horizon_ns is None and not requests["preemptions"].any():
            prompts = np.maximum(requests["prompt_tokens"][finished], 1)
            assert iterations["prefill_tokens"].sum() == prompts.sum()
        gaps, weights = columns.itl()
        assert (gaps >= 0).all()
        if not speculative:
            assert weights.sum() == np.maximum(requests["emitted_tokens"] - 1, 0).sum()

        # Memory stays within the pool.
        assert (iterations["kv_blocks_used"] <= experiment.replicas[0].kv_blocks).all()
        assert (iterations["kv_blocks_used"] >= 0).all()

        # Times are ordered.
        assert (requests["scheduled_ns"][finished] >= requests["arrival_ns"][finished]).all()
        emits = finished & (requests["output_tokens"] > 0)
        assert (requests["first_token_ns"][emits] > requests["scheduled_ns"][emits]).all()
        assert (requests["finish_ns"][emits] >= requests["first_token_ns"][emits]).all()
        assert (requests["finish_ns"][~finished] == -1).all()
        for replica in range(len(experiment.replicas)):
            mine = iterations["replica"] == replica
            start, duration = iterations["start_ns"][mine], iterations["duration_ns"][mine]
            assert (start[1:] >= (start + duration)[:-1]).all()
