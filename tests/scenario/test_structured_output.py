"""Settings of answers that keep to a grammar."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hwmodels.grammars import apply_s, grammar_terms
from sim.errors import ScenarioError
from sim.results.words import fact_rows
from sim.run import simulate
from sim.scenario import Scenario
from sim.scenario.assembly import build, resolve

DRAWN = {
    "arrivals": {"process": "poisson", "rate_per_s": 50},
    "prompt_tokens": 200,
    "output_tokens": 20,
    "requests": 80,
}


def scenario(asked: dict[str, Any] | None, **settings: Any) -> Scenario:
    return Scenario.from_mapping({"model": "qwen3-8b", "workload": DRAWN, "structured_output": asked, **settings})


def spec_of(asked: dict[str, Any], **settings: Any) -> Any:
    return build(scenario(asked, **settings)).hosted[0].grammars


def test_a_share_of_the_requests_has_one_of_the_grammars_the_popular_ones_more_often() -> None:
    found = np.array(spec_of({"share": 0.5, "grammars": 4, "exponent": 2.0}).grammar)
    assert 20 <= (found >= 0).sum() <= 60
    assert set(found[found >= 0]) <= {0, 1, 2, 3}
    assert (found == 0).sum() > (found > 0).sum()
    assert (np.array(spec_of({"grammars": 2}).grammar) >= 0).all()


def test_times_are_the_librarys_or_those_given() -> None:
    terms, found = grammar_terms("xgrammar"), spec_of({})
    assert (found.mask_s, found.step_s, found.compile_s) == (terms.mask_s, terms.step_s, (terms.compile_s,))
    # A bit for each of 151,936 tokens over PCIe, and logits of four bytes read and written.
    assert found.apply_s == pytest.approx(apply_s(151_936, host_bytes_per_s=64e9, hbm_bytes_per_s=3.35e12), rel=0.5)
    own = spec_of({"mask_s": 1e-4, "compile_s": 2.0, "threads": 1, "kept": 3, "apply_s": 0.0, "overlapped": False})
    assert (own.mask_s, own.compile_s, own.threads, own.kept, own.apply_s) == (1e-4, (2.0,), 1, 3, 0.0)
    assert not own.overlapped


def test_compiled_requests_go_first_where_the_engine_has_it_so() -> None:
    assert spec_of({}).goes_first
    assert not spec_of({}, serving_stack="sglang").goes_first


def test_all_machines_of_pools_that_hand_over_have_the_grammars_of_the_same_requests() -> None:
    pools = {"p": {"role": "prefill"}, "d": {"role": "decode"}}
    built = resolve(scenario({"share": 0.5}, pools=pools, links={"net": {}}))
    prefill, decode = built.experiment.hosted
    assert prefill.grammars.grammar == decode.grammars.grammar
    assert any("machines that decode are taken to have compiled" in note for note in built.manifest["notes"])


def test_the_summary_says_who_waited_and_none_did_without() -> None:
    result = simulate(build(scenario({"grammars": 3, "compile_s": 0.5})))
    found = result.summary["structured_output"]
    assert found["waited"] >= 3
    assert found["compile_wait_s"]["max"] == pytest.approx(0.5, abs=1e-6)
    assert "requests waited" in dict(fact_rows(result.summary))["Grammars"]
    assert "structured_output" not in simulate(build(scenario(None))).summary


def test_what_is_not_modelled_is_refused_in_one_sentence() -> None:
    ranks = {"parallel": {"data": 2, "tensor": 1, "expert": 2}, "model": "qwen3-30b-a3b"}
    with pytest.raises(
        ScenarioError, match=r"structured_output: masks under ranks of data-parallel attention are not modelled"
    ):
        build(scenario({}, **ranks))
    with pytest.raises(ScenarioError, match="share"):
        scenario({"share": 1.5})
    with pytest.raises(ScenarioError, match="library"):
        scenario({"library": "outlines2"})
