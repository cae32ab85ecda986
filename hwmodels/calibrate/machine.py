"""The host: its name, cores, memory, caches, and how much of it other work takes."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path


def cpu_title() -> str:
    """The processor's name as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def memory_bytes() -> float:
    """Memory of the machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def cache_bytes() -> float:
    """The largest cache of the first core; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        if match := re.fullmatch(r"(\d+)([KM]?)", text):
            sizes.append(float(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]])
    return max(sizes, default=float(32 << 20))


def clock_mhz() -> str:
    """Frequency of the first core now, as text, or nothing where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    return f"{float(found[1]):.0f} MHz" if found else ""


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def busy_cores(seconds: float = 0.4) -> float:
    """Cores that other processes keep busy, watched for *seconds*; 0 where the system does not say."""

    def ticks() -> tuple[float, float]:
        fields = [float(x) for x in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]]
        return sum(fields[:8]) - fields[3] - fields[4], sum(fields[:8])

    try:
        busy, total = ticks()
        own = time.process_time()
        time.sleep(seconds)
        later_busy, later_total = ticks()
    except (OSError, ValueError, IndexError):
        return 0.0
    own = time.process_time() - own
    share = (later_busy - busy) / max(1.0, later_total - total)
    return max(0.0, share * (os.cpu_count() or 1) - own / seconds)


def choose_threads(threads: int | None, clock: str) -> tuple[int, str]:
    """Threads and clock for a CPU: what was asked for, else the cores that are free, and processor time for one.

    With one thread the processor time of the process is what a run takes when nothing interrupts it. With several the
    wall clock is the only one that counts waiting for each other.
    """
    cores = available_cores()
    if threads is None:
        threads = max(1, cores - int(busy_cores() + 0.7))
    if clock == "auto":
        # A machine that is quiet now need not stay so, and on a quiet one the two clocks agree.
        clock = "cpu" if threads == 1 else "wall"
    return threads, clock


def timer(clock: str) -> Callable[[], float]:
    """Seconds of processor time for the clock `cpu`, and of the wall clock for others."""
    return time.process_time if clock == "cpu" else time.perf_counter


def label_of(title: str) -> str:
    """A processor's name as measured files spell devices: cpu, then lower case letters and digits."""
    words = re.sub(r"\(.*?\)|@.*|\b(cpu|processor|with|core)\b", " ", title.lower())
    return "cpu" + re.sub(r"[^a-z0-9]", "", words)[:20]
