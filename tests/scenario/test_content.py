"""A scenario's hash and a sweep's key follow every file and every module of a policy that a setting may name."""

import builtins
import io
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from sim.scenario import Scenario
from sim.scenario.assembly import resolve
from sim.scenario.keys import Settings
from sim.scenario.section import MayBeFile, Named, Policy, is_section, settings_of
from sim.study.points import content_key
from tests.sources import PACKAGES

POOLED = {"links": {"a": {}}}
PARTED = {**POOLED, "pools": {"a": {"role": "prefill"}, "b": {"role": "decode"}}}
ARRIVALS = {"process": "poisson", "rate_per_s": 1.0}
TIER = {"kind": "host", "gib": 1}
DRAFTED = {"method": "draft_model", "num_speculative_tokens": 2}


def _pool(**settings: Any) -> dict[str, Any]:
    return {"pools": {"a": settings}}


def _decoding(which: str, behind: str) -> dict[str, Any]:
    if which == "draft":
        return {**DRAFTED, "acceptance": {"alpha": 0.5}, "draft": {"model": behind}}
    return {**DRAFTED, "acceptance": {which: behind}, "draft": {"step_s": 0.1}}


# The setting, and a scenario in which it names the file `behind`.
FILES = {
    "model": lambda behind: {"model": behind},
    "hardware": lambda behind: {"hardware": behind},
    "serving_stack": lambda behind: {"serving_stack": behind},
    "placement": lambda behind: {"placement": behind},
    "costs.prices": lambda behind: {"costs": {"prices": behind}},
    "experts.popularity": lambda behind: {"experts": {"popularity": behind}},
    "decoding.draft.model": lambda behind: {"decoding": _decoding("draft", behind)},
    "decoding.acceptance.recorded": lambda behind: {"decoding": _decoding("recorded", behind)},
    "workload.trace": lambda behind: {"workload": {"trace": behind}},
    "workload.tokenizer": lambda behind: {"workload": {"trace": "conversation", "tokenizer": behind}},
    "workload.sessions": lambda behind: {"workload": {"sessions": behind, "arrivals": ARRIVALS}},
    "workload.servegen.arrivals": lambda behind: {
        "workload": {"servegen": {"arrivals": behind, "lengths": "other", "model": "m"}}
    },
    "workload.servegen.lengths": lambda behind: {
        "workload": {"servegen": {"arrivals": "other", "lengths": behind, "model": "m"}}
    },
    "pools.a.model": lambda behind: _pool(model=behind),
    "pools.a.models": lambda behind: _pool(models=["opt-13b", f"{behind}#2"]),
    "pools.a.hardware": lambda behind: _pool(hardware=behind),
    "pools.a.serving_stack": lambda behind: _pool(serving_stack=behind),
    "pools.a.experts.popularity": lambda behind: _pool(experts={"popularity": behind}),
    "pools.a.decoding_by_model.a.draft.model": lambda behind: _pool(
        models=["a", "b"], decoding_by_model={"a": _decoding("draft", behind)}
    ),
    "pools.a.decoding_by_model.a.acceptance.recorded": lambda behind: _pool(
        models=["a", "b"], decoding_by_model={"a": _decoding("recorded", behind)}
    ),
    "hardware.steps": lambda behind: {"hardware": {"steps": behind}},
    "hardware.device": lambda behind: {"hardware": {"steps": "x.csv", "device": behind}},
    "pools.a.hardware.steps": lambda behind: _pool(hardware={"steps": behind}),
    "pools.a.hardware.device": lambda behind: _pool(hardware={"steps": "x.csv", "device": behind}),
    "pools.a.decoding.draft.model": lambda behind: _pool(decoding=_decoding("draft", behind)),
    "pools.a.decoding.acceptance.recorded": lambda behind: _pool(decoding=_decoding("recorded", behind)),
}
# The setting, and a scenario in which it is the policy `behind`.
POLICIES = {
    "scheduler": lambda behind: {"scheduler": behind},
    "router": lambda behind: {"router": behind},
    "rank_router": lambda behind: {"rank_router": behind},
    "encode.router": lambda behind: {"encode": {"token_s": 0, "bandwidth_gb_per_s": 1, "router": behind}},
    "handover.router": lambda behind: {**PARTED, "handover": {"router": behind}},
    "encode.autoscale.policy": lambda behind: {
        "encode": {"token_s": 0, "bandwidth_gb_per_s": 1, "autoscale": {"policy": behind, "max": 2}}
    },
    "autoscale.policy": lambda behind: {"autoscale": {"policy": behind, "max": 2}},
    "decoding.acceptance.policy": lambda behind: {"decoding": _decoding("policy", behind)},
    "workload.generator": lambda behind: {"workload": {"generator": behind}},
    "memory.eviction": lambda behind: {"memory": {"eviction": behind}},
    "pools.a.memory.eviction": lambda behind: _pool(memory={"eviction": behind}),
    "memory.tiers.eviction": lambda behind: {"memory": {"tiers": [{**TIER, "eviction": behind}]}},
    "pools.a.memory.tiers.eviction": lambda behind: _pool(memory={"tiers": [{**TIER, "eviction": behind}]}),
    "pools.a.decoding_by_model.a.acceptance.policy": lambda behind: _pool(
        models=["a", "b"], decoding_by_model={"a": _decoding("policy", behind)}
    ),
    "pools.a.scheduler": lambda behind: _pool(scheduler=behind),
    "pools.a.rank_router": lambda behind: _pool(rank_router=behind),
    "pools.a.decoding.acceptance.policy": lambda behind: _pool(decoding=_decoding("policy", behind)),
    "pools.a.autoscale.policy": lambda behind: _pool(autoscale={"policy": behind, "max": 2}),
}
# The same of what else is chosen by name, whose settings are its own.
NAMED = {
    "workload.arrivals": lambda behind: {
        "workload": {"trace": "conversation", "arrivals": {"process": "piecewise", "file": behind}}
    },
    **{
        f"workload.{name}": lambda behind, name=name: {
            "workload": {"arrivals": ARRIVALS, "prompt_tokens": 1, "output_tokens": 1, "requests": 1}
            | {name: {"distribution": "empirical", "file": behind}}
        }
        for name in ("prompt_tokens", "output_tokens")
    },
    **{
        f"workload.images.{name}": lambda behind, name=name: {
            "workload": {"arrivals": ARRIVALS, "prompt_tokens": 1, "output_tokens": 1, "requests": 1}
            | {"images": {"width": 100, "height": 100} | {name: {"distribution": "empirical", "file": behind}}}
        }
        for name in ("per_request", "width", "height")
    },
    **{
        f"workload.audio.{name}": lambda behind, name=name: {
            "workload": {"arrivals": ARRIVALS, "prompt_tokens": 1, "output_tokens": 1, "requests": 1}
            | {"audio": {"milliseconds": 100} | {name: {"distribution": "empirical", "file": behind}}}
        }
        for name in ("per_request", "milliseconds")
    },
    **{
        f"workload.conversations.{name}": lambda behind, name=name: {
            "workload": {
                "arrivals": ARRIVALS,
                "conversations": {"sessions": 1, "turns": 1, "user_tokens": 1, "answer_tokens": 1}
                | {name: {"distribution": "empirical", "file": behind}},
            }
        }
        for name in ("turns", "user_tokens", "answer_tokens")
    },
}


def _settings_of(section: type, prefix: str = "") -> dict[str, str]:
    """Every setting of a type that may name a file or a policy, through all sections, with the kind; a pool is called a."""
    found: dict[str, str] = {}
    for name, kind in settings_of(section).items():
        found |= _kinds((kind, *getattr(kind, "__metadata__", ())), prefix + name)
    return found


def _kinds(parts: tuple[Any, ...], name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        if isinstance(part, MayBeFile) or part is Path:
            found[name] = "file"
        elif isinstance(part, type) and issubclass(part, Named):
            found[name] = "policy" if issubclass(part, Policy) else "named"
        elif is_section(part):
            found |= _settings_of(part, f"{name}.")
        else:
            pool = ".a" if getattr(part, "__origin__", None) is dict else ""
            found |= _kinds(get_args(part), name + pool)
    return found


def _identity(settings: dict[str, Any], folder: Path) -> tuple[str, str]:
    scenario = Scenario.from_mapping(settings, folder=folder)
    return scenario.hash, content_key(scenario)


def _both_differ(before: tuple[str, str], after: tuple[str, str]) -> bool:
    return all(one != other for one, other in zip(before, after, strict=True))


def test_every_setting_of_these_types_is_tried_here():
    cases = {**dict.fromkeys(FILES, "file"), **dict.fromkeys(POLICIES, "policy"), **dict.fromkeys(NAMED, "named")}
    assert _settings_of(Settings) == cases


@pytest.mark.parametrize("setting", [*FILES, *NAMED])
def test_hash_and_key_follow_the_content_of_a_file(setting, tmp_path):
    settings = {**FILES, **NAMED}[setting]("behind.toml")
    (tmp_path / "behind.toml").write_text("1\n")
    before = _identity(settings, tmp_path)
    assert _identity(settings, tmp_path) == before
    (tmp_path / "behind.toml").write_text("2\n")
    assert _both_differ(before, _identity(settings, tmp_path))


@pytest.mark.parametrize("setting", POLICIES)
@pytest.mark.parametrize(
    "policy",
    [
        "mine_too:Policy",
        {"policy": "mine_too:Policy", "depth": 3},
        {"policy": "cap", "inner": {"policy": "order", "inner": "mine_too:Policy"}},
    ],
    ids=["by name", "with settings", "wrapped"],
)
@pytest.mark.parametrize("changed", ["mine_too.py", "used_by_mine.py"])
def test_hash_and_key_follow_the_source_of_a_policy(setting, policy, changed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_too.py").write_text("import json\nfrom used_by_mine import x\n")
    (tmp_path / "used_by_mine.py").write_text("x = 1\n")
    settings = POLICIES[setting](policy)
    before = _identity(settings, tmp_path)
    assert _identity(settings, tmp_path) == before
    with (tmp_path / changed).open("a") as file:
        file.write("y = 2\n")
    assert _both_differ(before, _identity(settings, tmp_path))


def test_hash_and_key_follow_all_of_a_package_of_policies(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack_of_mine" / "deep").mkdir(parents=True)
    for name in ("__init__.py", "router.py", "deep/__init__.py", "deep/table.py"):
        (tmp_path / "pack_of_mine" / name).write_text("from . import other\n")
    before = _identity({"router": "pack_of_mine.router:Mine"}, tmp_path)
    (tmp_path / "pack_of_mine/deep/table.py").write_text("x = 1\n")
    assert _both_differ(before, _identity({"router": "pack_of_mine.router:Mine"}, tmp_path))


def test_hash_and_key_follow_the_file_that_a_policys_setting_names(tmp_path):
    settings = {"router": {"policy": "mine:Weighted", "tables": ["weights.csv"]}}
    (tmp_path / "weights.csv").write_text("1\n")
    before = _identity(settings, tmp_path)
    (tmp_path / "weights.csv").write_text("2\n")
    assert _both_differ(before, _identity(settings, tmp_path))


def test_hash_and_key_follow_the_models_that_a_placement_names(tmp_path):
    group = '{"inter_op": 1, "intra_op": 1, "models": ["own.json#1"]}'
    (tmp_path / "placed.json").write_text(f'{{"format": "rooftrace-placement-1", "groups": [{group}]}}')
    (tmp_path / "own.json").write_text("1\n")
    before = _identity({"placement": "placed.json"}, tmp_path)
    (tmp_path / "own.json").write_text("2\n")
    assert _both_differ(before, _identity({"placement": "placed.json"}, tmp_path))


def test_a_scenario_that_stays_in_memory_sees_its_files_change(tmp_path):
    (tmp_path / "trace.csv").write_text("1\n")
    scenario = Scenario.from_mapping({"workload": {"trace": "trace.csv"}}, folder=tmp_path)
    before = scenario.hash
    (tmp_path / "trace.csv").write_text("2\n")
    assert scenario.hash != before


def test_a_name_is_no_file_where_the_setting_knows_it(tmp_path):
    (tmp_path / "even").write_text("1\n")
    before = _identity({"experts": {"popularity": "even"}}, tmp_path)
    (tmp_path / "even").write_text("2\n")
    assert _identity({"experts": {"popularity": "even"}}, tmp_path) == before


def test_a_setting_of_another_type_cannot_be_looked_up_as_a_file(tmp_path):
    (tmp_path / "0.11").write_text("1\n")
    scenario = Scenario.from_mapping({"memory": {"release": "0.11"}}, folder=tmp_path)
    with pytest.raises(AssertionError, match="marked as a file"):
        scenario.find("0.11")


def test_every_file_that_is_opened_is_one_that_the_hash_follows(tmp_path, monkeypatch):
    catalogue = PACKAGES / "hwmodels"
    (tmp_path / "model").mkdir()
    shutil.copy(catalogue / "models/qwen3-30b-a3b.json", tmp_path / "model/config.json")
    shutil.copy(catalogue / "profiles/h100-sxm.toml", tmp_path / "device.toml")
    (tmp_path / "popularity.txt").write_text("1\n" * 128)
    (tmp_path / "accepted.csv").write_text("request,round,accepted\n0,0,1\n0,1,2\n")
    (tmp_path / "rates.csv").write_text("start_s,rate_per_s\n0,1\n60,1\n")
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n1,10,2\n")
    settings = {
        "model": "model",
        "hardware": "device.toml",
        "parallel": {"data": 2, "expert": 2},
        "experts": {"popularity": "popularity.txt"},
        "decoding": {"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"recorded": "accepted.csv"}},
        "workload": {"trace": "trace.csv", "arrivals": {"process": "piecewise", "file": "rates.csv"}},
    }
    opened: set[Path] = set()

    def recording(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | Path) and Path(path).is_relative_to(tmp_path):
            opened.add(Path(path))
        return really_open(path, *args, **kwargs)

    really_open = io.open
    with monkeypatch.context() as patched:
        patched.setattr(io, "open", recording)
        patched.setattr(builtins, "open", recording)
        resolve(Scenario.from_mapping(settings, folder=tmp_path))
    assert len(opened) == 6
    for file in opened:
        before = _identity(settings, tmp_path)
        file.write_text(file.read_text() + "\n")
        assert _both_differ(before, _identity(settings, tmp_path)), file


LLAMA = "llama-3.1-8b"


@pytest.mark.parametrize("setting", ["model", "decoding.draft.model", "pools.a.model", "pools.a.models"])
def test_a_model_in_the_hubs_cache_belongs_to_the_content(tmp_path, monkeypatch, setting):
    """Two machines with other files under one name do not have one hash, nor has one machine before and after an update."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    folder = tmp_path / "hub" / "models--somebody--mystery" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    scenario = Scenario(**FILES[setting]("somebody/mystery"))
    seen = {scenario.hash}
    for file, text in (("config.json", "{}"), ("config.json", '{"a": 1}'), ("hf_quant_config.json", "{}")):
        (folder / file).write_text(text)
        assert scenario.hash not in seen
        seen.add(scenario.hash)
    assert Scenario(model=LLAMA).hash == Scenario(model=LLAMA).hash


def test_formats_beside_a_models_config_belong_to_the_content(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    scenario = Scenario(model=str(tmp_path))
    before = scenario.hash
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert scenario.hash != before


def test_a_scenario_says_which_models_it_names(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    pools = {"a": {"models": ["opt-13b", "somebody/mystery#2"]}, "b": {"model": str(tmp_path)}}
    scenario = Scenario(model="qwen3-8b", pools=pools, decoding=_decoding("draft", "opt-125m"))
    assert sorted(scenario.models) == ["opt-125m", "opt-13b", "qwen3-8b", "somebody/mystery"]
