"""Traces of prompts that are put together from components."""

import json

import numpy as np
import pytest

from sim.scenario import Scenario
from sim.scenario.workload import workload_of
from workloads import read_trace, reuse

BLOCK = 16
KINDS = ("system", "passage", "history", "user")


def write(folder, requests, tokens, name="rag"):
    """A file of components with its table of lengths; the chat template takes nine tokens."""
    path = folder / f"{name}_components.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 9 + sum(tokens[each] for ids in kinds.values() for each in ids),
         "output_length": 3, "session": i // 2, "hash_ids": kinds}
        for i, kinds in enumerate(requests)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = "".join(f"{each},passage,{n}\n" for each, n in tokens.items())
    (folder / f"{name}_component_lengths.csv").write_text("id,component,tokens\n" + rows)
    return path


def drawn(seed, n=40):
    rng = np.random.default_rng(seed)
    tokens = {each: int(rng.integers(0, 90)) for each in range(25)}
    requests = [
        {"system": rng.integers(0, 3, 2).tolist(), "passage": rng.choice(np.arange(3, 12), 3, replace=False).tolist(),
         "user": [int(rng.integers(12, 25))]}
        for _ in range(n)
    ]  # fmt: skip
    return requests, tokens


def spelled(kinds, tokens):
    """A prompt token by token."""
    return [(each, place) for ids in kinds.values() for each in ids for place in range(tokens[each])]


@pytest.mark.parametrize("seed", range(5))
def test_two_prompts_share_the_blocks_whose_tokens_are_all_the_same(tmp_path, seed):
    requests, tokens = drawn(seed)
    trace = read_trace(write(tmp_path, requests, tokens))
    assert trace.prefix_block_tokens == BLOCK
    assert trace.session.tolist() == [i // 2 for i in range(len(requests))]
    texts = [spelled(kinds, tokens) for kinds in requests]
    for i, one in enumerate(texts):
        mine = trace.prefix_of(i).tolist()
        assert len(mine) == len(one) // BLOCK
        for j, other in enumerate(texts[:i]):
            common = 0
            while common < min(len(one), len(other)) and one[common] == other[common]:
                common += 1
            theirs = trace.prefix_of(j).tolist()
            equal = [a == b for a, b in zip(mine, theirs, strict=False)]
            assert equal == [True] * (common // BLOCK) + [False] * (len(equal) - common // BLOCK)


@pytest.mark.parametrize("seed", range(5))
def test_components_in_the_order_of_earlier_prompts_are_the_same_ones_and_found_more_often(tmp_path, seed):
    requests, tokens = drawn(seed, n=120)
    path = write(tmp_path, requests, tokens)
    sent, seen = read_trace(path), read_trace(path, component_order="seen")
    assert (sent.prompt_tokens == seen.prompt_tokens).all()
    assert [len(sent.prefix_of(i)) for i in range(120)] == [len(seen.prefix_of(i)) for i in range(120)]
    assert reuse(seen).best_hit_rate > reuse(sent).best_hit_rate


def test_the_order_of_earlier_prompts_looks_at_no_later_one(tmp_path):
    requests, tokens = drawn(1, n=60)
    whole = read_trace(write(tmp_path, requests, tokens), component_order="seen")
    cut = read_trace(write(tmp_path, requests[:20], tokens, "cut"), component_order="seen")
    assert (whole.limit(20).prefix_blocks == cut.prefix_blocks).all()


def test_a_note_says_how_much_was_seen_before_wherever_it_stood(tmp_path):
    tokens = {1: 32, 2: 64, 3: 30}
    requests = [{"passage": [1, 2]}, {"passage": [2, 1], "user": [3]}]
    (note,) = read_trace(write(tmp_path, requests, tokens)).notes
    assert f"{100 * 96 / (105 + 135):.1f} % of the prompt tokens" in note


def test_a_scenario_reads_them_and_their_order(tmp_path):
    path = write(tmp_path, *drawn(3))
    asked = {"trace": str(path), "component_order": "seen"}
    made = workload_of(Scenario.from_mapping({"model": "llama-3.1-8b", "hardware": "h100-sxm", "workload": asked}))
    assert (made.prefix_blocks == read_trace(path, component_order="seen").prefix_blocks).all()


def test_faults_are_named_with_their_line(tmp_path):
    path = write(tmp_path, [{"system": [1]}, {"system": [2]}], {1: 20, 2: 20})
    (tmp_path / "rag_component_lengths.csv").write_text("id,component,tokens\n1,system,20\n")
    with pytest.raises(ValueError, match="line 2: component 2 has no length"):
        read_trace(path)
    (tmp_path / "rag_component_lengths.csv").write_text("id,component,tokens\n1,system,20\n2,system,200\n")
    with pytest.raises(ValueError, match="line 2: its components have 192 tokens and more, and input_length is 29"):
        read_trace(path)
    (tmp_path / "rag_component_lengths.csv").write_text("id,component,tokens\n1,system,many\n")
    with pytest.raises(ValueError, match="expected whole numbers in columns id and tokens"):
        read_trace(path)
    (tmp_path / "rag_component_lengths.csv").unlink()
    with pytest.raises(ValueError, match=r"rag_component_lengths\.csv beside it"):
        read_trace(path)
    (tmp_path / "rag_component_lengths.csv").write_text("id,component,tokens\n1,system,20\n")
    for ids in ('"x"', "[-1]", "[true]", "[1.5]"):
        path.write_text(
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": {"system": IDS}}\n'.replace("IDS", ids)
        )
        with pytest.raises(ValueError, match="line 1, column hash_ids: expected lists of ids by kind of component"):
            read_trace(path)


def test_an_order_of_components_is_refused_where_a_trace_names_none(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    with pytest.raises(ValueError, match="component_order is of prompts made of components, and this file is plain"):
        read_trace(path, component_order="seen")
    with pytest.raises(ValueError, match="component_order is one of as_sent, seen"):
        read_trace(path, component_order="best")


def test_ragpulse_is_found_again_as_its_own_blocks_of_512_tokens_say(shared):
    path = shared / "measured3" / "ragpulse_components.jsonl"
    mine = reuse(read_trace(path, limit=1500)).best_hit_rate
    theirs = reuse(read_trace(shared / "measured3" / "ragpulse_mooncake512.jsonl", limit=1500)).best_hit_rate
    assert mine == pytest.approx(theirs, abs=0.02)
    assert mine < reuse(read_trace(path, limit=1500, component_order="seen")).best_hit_rate
