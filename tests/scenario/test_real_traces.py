"""The published traces, whole, under every scheduler. Skipped where the shared data is not there."""

import inspect
import itertools
from pathlib import Path
from pkgutil import resolve_name

import pytest

from policies.driving import driving
from sim import simulate
from sim.scenario import Scenario, named
from tests.sample import with_all

TRACES = Path(__file__).parents[3] / "shared" / "traces"


NEEDED = {"pad": {"sequences": 64}, "order": {"by": "shortest_prompt"}, "cap": {"max_sequences": 24}}
"""Settings without which a scheduler is refused, but for the one inside."""


@pytest.mark.slow(reason="a whole recorded trace")
@pytest.mark.parametrize(
    "scheduler", [name for name in named.SCHEDULERS if not driving(resolve_name(named.SCHEDULERS[name]))]
)
@pytest.mark.parametrize(
    ("file", "requests"),
    [
        pytest.param("AzureLLMInferenceTrace_conv.csv", 19_366, marks=with_all),
        ("AzureLLMInferenceTrace_code.csv", 8_819),
    ],
)
def test_every_request_of_the_azure_traces_is_accounted_for(file, requests, scheduler):
    path = TRACES / file
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    settings = {"policy": scheduler, **NEEDED.get(scheduler, {})}
    if "inner" in inspect.signature(resolve_name(named.SCHEDULERS[scheduler])).parameters:
        settings["inner"] = "sarathi"
    classes = {name: {"share": 1, "tenant": name, "slo": {"ttft_s": 5.0}} for name in ("shop", "lab")}
    scenario = Scenario(workload={"trace": str(path)}, classes=classes, scheduler=settings)
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
