"""What a request draws next depends on the rounds that it has done, wherever it did them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from policies.acceptance import Iid
from policies.decoding import Speculative
from policies.published import OrcaPaged
from policies.routers import RoundRobin
from policies.wrappers import EvictNewest
from sim.engine import Experiment, ReplicaSpec, run
from sim.engine.batch.speculative_set import SpeculativeSet
from tests.engine.costs import Linear
from workloads import Trace

SPECULATIVE = Speculative(method="draft_model", num_speculative_tokens=3, acceptance=Iid(alpha=0.6))


@dataclass
class Logged:
    """A decoding method that notes from which round on each request draws."""

    draws: list[tuple[int, int]] = field(default_factory=list)
    max_query_tokens: int = SPECULATIVE.max_query_tokens

    def query_tokens(self, n_decoding: int, /) -> int:
        return SPECULATIVE.query_tokens(n_decoding)

    def k(self, n_decoding: int, /) -> int:
        return SPECULATIVE.k(n_decoding)

    def draft_steps(self, n_decoding: int, /) -> int:
        return SPECULATIVE.draft_steps(n_decoding)

    def round_tokens(self, request_id: int, round_start: int, n_tokens: int, k: int, seed: int, /) -> NDArray[np.int64]:
        self.draws.append((request_id, round_start))
        return SPECULATIVE.round_tokens(request_id, round_start, n_tokens, k, seed)


def test_a_set_goes_on_where_another_left_off() -> None:
    rounds = array("i", [0])
    one, other = (SpeculativeSet(16, None, SPECULATIVE, 7, rounds) for _ in range(2))
    one.join(0, 10, 40, 0, 1)
    one.advance(5)
    emitted = one.leave(0).emitted
    other.join(0, 10 + emitted, 40 - emitted, 0, -(-(10 + emitted) // 16))
    whole = SPECULATIVE.round_tokens(0, 0, 40, 3, 7)
    assert other.emitted_in(3).tolist() == whole[5:8].tolist()


def test_a_preempted_request_that_comes_back_in_another_lane_of_a_pipeline_draws_on_from_its_round() -> None:
    decoding = Logged()
    n = 12
    trace = Trace(arrival_ns=[0] * n, prompt_tokens=[20] * n, output_tokens=[60] * n)
    spec = ReplicaSpec(
        cost=Linear(n_stages=2), scheduler=EvictNewest(OrcaPaged(6)), kv_blocks=90, block_tokens=4, decoding=decoding
    )
    columns = run(Experiment(workload=trace, replicas=(spec,), router=RoundRobin(), seed=3), check_invariants=True)
    assert columns.meta["preemptions"] > 10
    again = 0
    for id_ in range(n):
        starts = [start for request, start in decoding.draws if request == id_]
        assert starts == sorted(starts)
        again += sum(start > 0 for start in starts)
    # Whoever comes back has done rounds before; nobody who has starts at round 0 again.
    assert again > 10
