"""The lines that a vLLM server logs every ten seconds: throughput, requests running and waiting, KV use, cache hits, drafts.

vllm-project/vllm, vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py (0.8 to 0.32).
"""

from __future__ import annotations

import re
import statistics

from sim.bench.fields import Unreadable
from sim.bench.measured import BenchRun, ServerSide

FORMAT = "vLLM log"
_LINE = re.compile(
    r"Avg prompt throughput: (\d{1,12}(?:\.\d{1,9})?) tokens/s, Avg generation throughput: (\d{1,12}(?:\.\d{1,9})?) tokens/s, "
    r"Running: (\d{1,9}) reqs, "
    r"(?:Swapped: \d+ reqs, )?(?:Waiting|Pending): (\d{1,9}) reqs"
)
_KV = re.compile(r"KV cache usage: (\d{1,12}(?:\.\d{1,9})?)%")
_HITS = re.compile(r"Prefix cache hit rate: (?:GPU: )?(\d{1,12}(?:\.\d{1,9})?)%")
_PREEMPTIONS = re.compile(r"Preemptions: (\d{1,12})")
_CAPACITY = re.compile(r"KV cache size: ([\d,]{1,15}) tokens")
_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks: (\d{1,12})")
_DRAFTS = re.compile(
    r"Mean acceptance length: (\d{1,12}(?:\.\d{1,9})?).*?Avg Draft acceptance rate: (\d{1,12}(?:\.\d{1,9})?)%",
    re.IGNORECASE,
)
_VERSION = re.compile(r"vLLM (?:API server )?version v?(\d+\.\d+[\w.]*)")


def is_one(text: str) -> bool:
    """Whether *text* is such a log."""
    return "Avg prompt throughput:" in text or "Avg generation throughput:" in text


def read(text: str, name: str, file: str) -> list[BenchRun]:
    """What the busy lines of *text* have on average: those with requests running or waiting."""
    lines = [(match, line) for line in text.splitlines() if (match := _LINE.search(line))]
    if not lines:
        raise Unreadable(
            "no line of the log is whole: 'Avg prompt throughput: ..., Running: ... reqs, Waiting: ... reqs, ...'"
        )
    busy = [(match, line) for match, line in lines if int(match[3]) or int(match[4])]
    if not busy:
        raise Unreadable(f"the server was idle in each of the {len(lines)} lines of its log")

    def mean(values: list[float]) -> float | None:
        return statistics.fmean(values) if values else None

    def found(pattern: re.Pattern[str]) -> list[float]:
        return [float(match[1]) / 100 for _, line in busy if (match := pattern.search(line))]

    capacity = _CAPACITY.findall(text)
    drafts = _DRAFTS.findall(text)
    hits, preemptions = found(_HITS), [int(match[1]) for _, line in busy if (match := _PREEMPTIONS.search(line))]
    version, blocks = _VERSION.search(text), _BLOCKS.search(text)
    return [
        BenchRun(
            name=name,
            file=file,
            format=FORMAT,
            duration_s=None,
            input_tokens_per_s=mean([float(match[1]) for match, _ in busy]),
            output_tokens_per_s=mean([float(match[2]) for match, _ in busy]),
            server=ServerSide(
                running=mean([float(match[3]) for match, _ in busy]),
                waiting=mean([float(match[4]) for match, _ in busy]),
                kv_used=mean(found(_KV)),
                kv_tokens=sum(int(each.replace(",", "")) for each in capacity if each.strip(",")) or None,
                prefix_hit=hits[-1] if hits else None,
                preemptions=preemptions[-1] if preemptions else None,
                acceptance_length=mean([float(length) for length, _ in drafts]),
                accepted=mean([float(rate) / 100 for _, rate in drafts]),
            ),
            config={
                **({"version": version[1]} if version else {}),
                **({"kv_blocks": int(blocks[1])} if blocks else {}),
            },
            notes=(
                f"means over {len(busy)} of {len(lines)} lines, those with requests under way; a log says nothing of single "
                "requests, so that no latency is known",
            ),
        )
    ]
