"""Metrics as they come, in files and from servers."""

from __future__ import annotations

import socketserver
from pathlib import Path

import pytest

from sim.errors import RooftraceError
from sim.explore.watching import Endpoints
from sim.observe.samples import Matching, read_files
from tests.observe.observing import answering, refused


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "t_s,finished_total\n0,0\nnan,2\n", "line 3: t_s is nan, and no time"),
        ("a.csv", "t_s,finished_total\n0,0\n,2\n", "line 3: t_s is '', and no number"),
        ("a.csv", "t_s,finished_total\n0,0\n1,2,3\n", "line 3: it has more cells than the table has columns"),
        ("a.csv", "t_s,finished_total\n0,0\n1,1\n2,2\n1e15,3\n", "is the time of one of them wrong?"),
        ("2026-13-45T10:15:00.prom", "vllm:num_requests_running 1\n", "2026-13-45T10:15:00 in its name is no date"),
        (
            "a.prom",
            "".join(
                f'vllm:time_to_first_token_seconds_{each} {at} {at}000\n'
                for at in (1_764_000_000, 1_764_000_060) for each in ("bucket", "count", "sum")
            ),
            "a sample has no number in its label le",
        ),
    ],
)  # fmt: skip
def test_metrics_that_cannot_be_read_are_one_sentence(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    refused(tmp_path / name, "--prompt-tokens", 9, "--output-tokens", 9, "--out", tmp_path / "out", said=said)


@pytest.mark.parametrize(
    ("name", "at_s"),
    [
        ("pod-1234567890@1764000000.prom", 1_764_000_000),
        ("pod-a@20251124T160000.prom", 1_764_000_000),
        ("1764000000-pod@a.prom", 1_764_000_000),
        ("2025-11-24T17:00:00.25+01:00.prom", 1_764_000_000),
    ],
)
def test_the_instant_of_a_scrape_is_that_of_its_name(name: str, at_s: float, tmp_path: Path) -> None:
    (tmp_path / name).write_text("vllm:num_requests_running 1\n")
    notes: list[str] = []
    (series,) = read_files([tmp_path / name], Matching(labels={}), notes)
    assert series.at_s.tolist() == [at_s]
    assert notes == []


def test_an_instant_that_is_only_of_the_file_is_noted(tmp_path: Path) -> None:
    (tmp_path / "pod.prom").write_text("vllm:num_requests_running 1\n")
    notes: list[str] = []
    read_files([tmp_path / "pod.prom"], Matching(labels={}), notes)
    assert "it is when the file was written" in notes[0]


class NoHttp(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(b"SSH-2.0-nobody\r\n")


def test_an_address_that_does_not_speak_http_is_one_sentence() -> None:
    with answering(socketserver.TCPServer(("127.0.0.1", 0), NoHttp)) as url:
        for where in (url, f"{url}/a b"):
            refused("--prometheus", where, "--since", "1h", said="does not answer as Prometheus does")
            with pytest.raises(RooftraceError, match="does not answer"):
                Endpoints([where]).series(0.0, 0.0)
