"""Code blocks marked in the documents are executed; the README's links lead somewhere, and it shows what its command prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
MARK = "<!-- executed by tests/test_docs.py -->"


def blocks() -> list[tuple[str, str]]:
    """(document, code) of every marked Python block."""
    found = []
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        text = path.read_text(encoding="utf-8")
        for code in re.findall(re.escape(MARK) + r"\n```python\n(.*?)```", text, re.DOTALL):
            found.append((path.relative_to(ROOT).as_posix(), code))
    return found


@pytest.mark.parametrize(("document", "code"), blocks(), ids=lambda value: value if value.endswith(".md") else "")
def test_code_in_documents_runs(document: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("example_from_a_document")
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, document, "exec"), module.__dict__)
    tests = [value for name, value in vars(module).items() if name.startswith("test_") and callable(value)]
    for test in tests:
        test()


def test_the_page_on_python_has_all_that_documents_and_notebooks_import() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    public = set(re.findall(r"`([\w.]+)`", page))
    public |= {line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")}
    codes = [*blocks(), *((path.name, path.read_text(encoding="utf-8")) for path in (ROOT / "notebooks").glob("*.py"))]
    assert len(codes) > 8
    for where, code in codes:
        for module in re.findall(r"^\s*from ((?:sim|hwmodels|policies|workloads)[\w.]*) import", code, re.MULTILINE):
            known = module in public or any(name.startswith(f"{module}.") for name in public)
            assert known, f"{where} imports from {module}, which docs/reference/python.md does not have"


@pytest.mark.parametrize(
    "beside",
    [
        (),
        ("parallel={pipeline: 2}",),
        ("replicas=2", "router=power_of_two"),
        ("decoding={method: ngram, num_speculative_tokens: 3, acceptance: {alpha: 0.6}}", "memory.prefix_caching=true"),
    ],
    ids=["alone", "pipeline", "router", "speculation"],
)
def test_the_contributors_policy_runs_in_a_scenario(
    beside: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sim import Scenario, simulate

    code = next(code for document, code in blocks() if document == "CONTRIBUTING.md")
    (tmp_path / "shortest_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    scenario = Scenario.default().with_set("workload={trace: conversation, limit: 50}")
    scenario = scenario.with_set("scheduler={policy: 'shortest_example:ShortestFirst', max_sequences: 8}", *beside)
    assert simulate(scenario).summary["requests"]["finished"] == 50


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_the_contributors_eviction_policy_runs_in_a_scenario(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sim import Scenario, simulate

    code = [code for document, code in blocks() if document == "CONTRIBUTING.md"][1]
    (tmp_path / "ends_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    load = (
        "{groups: 6, prompts_per_group: 4, system_prompt_tokens: 300, question_tokens: 100, output_tokens: 5, "
        "stages: [{rate_per_s: 5, duration_s: 9}]}"
    )
    scenario = Scenario(serving_stack=stack, scheduler=stack).with_set(f"workload={{shared_prefix: {load}}}")
    scenario = scenario.with_set(f"memory.kv_blocks={60 if stack == 'vllm' else 960}")
    found = simulate(scenario.with_set("memory.eviction={policy: 'ends_example:EndsFirst', step_tokens: 64}"))
    assert found.summary["prefix_cache"]["hits"] > 0
    assert found.summary["prefix_cache"]["evictions"] > 0


@pytest.mark.parametrize(
    ("document", "name", "settings"),
    [
        (
            "docs/how-to/routers.md",
            "LongApart",
            ("replicas=3", "parallel.pipeline=2", "router={policy: 'an_example:LongApart', long_tokens: 300}"),
        ),
        (
            "docs/fleet.md",
            "ByTail",
            ("autoscale={policy: {policy: 'an_example:ByTail', ttft_s: 0.01}, max: 3, interval_s: 5, start: {}}",),
        ),
    ],
)
def test_the_router_and_the_control_policy_of_the_documents_run_in_a_scenario(
    document: str, name: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sim import Scenario, simulate

    _save_example(document, name, tmp_path, monkeypatch)
    drafts = "decoding={method: ngram, num_speculative_tokens: 3, acceptance: {alpha: 0.6}}"
    result = simulate(Scenario.default().with_set("workload.limit=200", drafts, *settings))
    assert result.summary["requests"]["finished"] == 200
    assert set(result.requests["replica"]) == {0, 1, 2}


def test_the_placement_search_of_the_documents_runs_in_a_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from sim.cli import build_app

    _save_example("docs/multi_model.md", "Dealt", tmp_path, monkeypatch)
    asked = ("--set", "placement={policy: 'an_example:Dealt', depths: [4, 8]}", "--set", "workload.duration_s=20")
    example = str(ROOT / "examples" / "placement" / "alpaserve.yaml")
    done = CliRunner().invoke(build_app(), ["place", example, *asked])
    assert done.exit_code == 0, done.output
    assert "\nGroups                    2 x (8, 1)" in done.output


def _save_example(document: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the code of *document* that has the class *name* as the module an_example."""
    (code,) = (code for each, code in blocks() if each == document and f"class {name}" in code)
    (folder / "an_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "an_example", raising=False)


def test_the_contributors_workload_runs_in_a_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim import Scenario, simulate

    code = [code for document, code in blocks() if document == "CONTRIBUTING.md"][2]
    (tmp_path / "batches_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = "{policy: 'batches_example:Batches.equal', requests: 20, size: 8}"
    result = simulate(Scenario.default().with_set(f"workload={{generator: {own}}}"))
    assert len(set(result.columns.requests["arrival_ns"].tolist())) == 3


def _anchors(page: Path) -> set[str]:
    """The names of headings of *page* in links, as GitHub and mkdocs make it of them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


PAGES = [path.relative_to(ROOT).as_posix() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])]
BUILT = {"docs/reference/commands.md", "docs/reference/scenario.md"}
"""Pages that `docs/hooks.py` writes while the site is built."""


def test_links_lead_to_a_page_and_its_heading() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / name if name else ROOT / page).resolve()
            if "://" in link or (target.is_relative_to(ROOT) and target.relative_to(ROOT).as_posix() in BUILT):
                continue
            assert target.exists(), (page, link)
            assert not anchor or anchor in _anchors(target), (page, link)


def test_every_page_of_the_documents_is_in_the_navigation() -> None:
    named = set(re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {f"docs/{name}" for name in named} - BUILT == {page for page in PAGES if page.startswith("docs/")}


@pytest.mark.slow(reason="whole commands in processes of their own")
def test_the_readme_shows_what_its_first_command_prints() -> None:
    from sim import Scenario, simulate
    from sim.results import latency_rows

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^ ((?:TTFT|TPOT|ITL|E2EL) \([a-z ]+\)) +(.+)$", text, re.MULTILINE)
    shown = [(name, re.split(r" {2,}", cells.strip())) for name, cells in rows]
    assert len(shown) == 4
    assert shown == latency_rows(simulate(Scenario.default()).summary)[:4]
