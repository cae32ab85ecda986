"""The published traces, whole, under every scheduler. Skipped where the shared data is not there."""

import itertools
from pathlib import Path

import pytest

from sim import simulate
from sim.scenario import Scenario, named

TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", named.SCHEDULERS)
@pytest.mark.parametrize(
    ("file", "requests"), [("AzureLLMInferenceTrace_conv.csv", 19_366), ("AzureLLMInferenceTrace_code.csv", 8_819)]
)
def test_every_request_of_the_azure_traces_is_accounted_for(file, requests, scheduler):
    path = TRACES / file
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    scenario = Scenario(workload={"trace": str(path)}, scheduler=scheduler)
    result = simulate(scenario)
    counts = result.summary["requests"]
    assert counts["total"] == requests
    assert counts["finished"] + counts["rejected"] == requests
    columns = result.columns.requests
    done = columns["status"] == 0
    times = [columns[name][done] for name in ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns")]
    assert all((earlier <= later).all() for earlier, later in itertools.pairwise(times))
    assert (columns["emitted_tokens"][done] == columns["output_tokens"][done]).all()
    assert result.summary["kv_utilization"]["max"] <= 1
    assert result.summary["wall_s"] < 20
