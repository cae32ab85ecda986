"""Runs scenarios on the processes of this machine or of a Dask cluster, and stores each as soon as it is done."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sim.errors import RooftraceError
from sim.scenario import Scenario
from sim.study.points import Run

BATCH_S = 0.4
"""Work handed to a process at once: long against the few ms of handing over, short against the end of a sweep."""
MAX_BATCH = 256
DIED = "the process that ran it died twice; it may have run out of memory"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ended. *record* is its JSON text where it is still to be stored."""

    key: str
    error: str
    seconds: float
    record: str | None = None


class Store:
    """Finished runs in a folder, one file each, named by key; a file is there in whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __contains__(self, key: str) -> bool:
        return os.path.exists(self.path(key))

    def path(self, key: str) -> str:
        return f"{self.folder}/{key}.json"

    def put(self, key: str, record: str) -> None:
        scratch = f"{self.folder}/.{key}.{os.getpid()}.{secrets.token_hex(3)}"
        try:
            with open(scratch, "w", encoding="utf-8") as file:
                file.write(record)
            os.replace(scratch, self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise

    def get(self, key: str) -> dict[str, Any]:
        """The record of *key*; RooftraceError where it is missing or damaged."""
        try:
            with open(self.path(key), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError) as error:
            raise RooftraceError(
                f"{self.path(key)} cannot be read ({error}); delete it and run the sweep again"
            ) from None

    def clear_scratch(self) -> None:
        """Remove what processes that are no more left half written."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") and not _alive(entry.name.split(".")[2:3]):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)


def _alive(pid: Sequence[str]) -> bool:
    if not pid or not pid[0].isdigit():
        return False
    try:
        os.kill(int(pid[0]), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def run_batch(batch: Sequence[tuple[str, Scenario]], folder: str | None, owner: int | None = None) -> list[Outcome]:
    """Run scenarios one after another; store each in *folder* when it ends, or hand its record back without one.

    Where *owner*, the process that handed the batch over, is no longer this one's parent, this one ends: the runs may
    by now be done by a sweep that goes on with the killed one.
    """
    store = None if folder is None else Store(Path(folder))
    outcomes = []
    for key, scenario in batch:
        begun = time.perf_counter()
        record = run_record(key, scenario)
        text = json.dumps(record, allow_nan=False)
        if owner is not None and os.getppid() != owner:
            os._exit(0)
        if store is not None:
            store.put(key, text)
        outcomes.append(
            Outcome(key, record.get("error", ""), time.perf_counter() - begun, None if store is not None else text)
        )
    return outcomes


def run_record(key: str, scenario: Scenario) -> dict[str, Any]:
    """What is stored of one run: its summary, or the error that it ended with."""
    from sim.run import run_built
    from sim.scenario.build import resolve

    record: dict[str, Any] = {"key": key, "seed": scenario.seed, "settings": scenario.settings()}
    try:
        built = resolve(scenario)
        result = run_built(built)
        return {
            **record,
            "label": result.label,
            "gpus": gpus(scenario),
            **_fleet(built.manifest),
            "summary": result.summary,
        }
    except RooftraceError as error:
        return failed(record, str(error))
    except Exception as error:
        # A policy of the user's own, or a defect of ours: the other points go on, and the table says what happened.
        return failed(record, f"{type(error).__name__}: {error}")


def gpus(scenario: Scenario) -> int:
    """GPUs that *scenario* occupies: those of a replica times the replicas, over all pools."""
    if scenario.pools is None and scenario.placement is None:
        return scenario.replicas * math.prod(scenario.parallel.model_dump().values())
    from sim.scenario.build import pools_of

    return sum(pool.gpus for pool in pools_of(scenario))


def _fleet(manifest: dict[str, Any]) -> dict[str, Any]:
    """What all pools together cost an hour (None where a price is not known) and draw at most; empty without pools."""
    if "pools" not in manifest:
        return {}
    parts = [(pool["gpus"], pool["hardware"]) for pool in manifest["pools"].values()]
    prices = [hardware["price_usd_per_hour"] for _, hardware in parts]
    usd = None
    if None not in prices:
        usd = sum(n * price for (n, _), price in zip(parts, prices, strict=True))
    return {"fleet": {"usd_per_hour": usd, "tdp_w": sum(n * hardware["tdp_w"] for n, hardware in parts)}}


def failed(record: dict[str, Any], error: str) -> dict[str, Any]:
    return {**record, "error": error or "an error without a message"}


class Backend(Protocol):
    """Where batches run. `submit` hands one over; `died` says whether an exception means that a process was lost."""

    width: int
    folder: str | None

    def submit(self, batch: Sequence[tuple[str, Scenario]]) -> Future[list[Outcome]]: ...

    def died(self, error: BaseException) -> bool: ...

    def restart(self) -> None: ...

    def close(self, *, now: bool) -> None: ...


class Inline:
    """This process."""

    width = 1

    def __init__(self, folder: Path) -> None:
        self.folder: str | None = str(folder)

    def submit(self, batch: Sequence[tuple[str, Scenario]]) -> Future[list[Outcome]]:
        future: Future[list[Outcome]] = Future()
        future.set_result(run_batch(batch, self.folder))
        return future

    def died(self, error: BaseException) -> bool:
        return False

    def restart(self) -> None:
        pass

    def close(self, *, now: bool) -> None:
        pass


class Processes:
    """*jobs* processes of this machine (joblib's loky), each with one thread for numerics."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self.width = jobs
        self.folder: str | None = str(folder)
        self._executor: Any = None

    def submit(self, batch: Sequence[tuple[str, Scenario]]) -> Future[list[Outcome]]:
        if self._executor is None:
            from joblib.externals.loky import ProcessPoolExecutor

            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            # Fresh for each sweep: a reused process would keep an older version of a policy that was edited since.
            self._executor = ProcessPoolExecutor(max_workers=self.width, timeout=20, env=threads)
        return self._executor.submit(run_batch, batch, self.folder, os.getpid())

    def died(self, error: BaseException) -> bool:
        from concurrent.futures import BrokenExecutor

        return isinstance(error, BrokenExecutor)

    def restart(self) -> None:
        self.close(now=True)

    def close(self, *, now: bool) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=now)
            self._executor = None


class Cluster:
    """The workers of a running Dask scheduler. Records come back to this machine, which stores them."""

    folder: str | None = None

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise RooftraceError("--cluster needs Dask: pip install 'rooftrace[distributed]'") from None
        try:
            self._client: Any = Client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise RooftraceError(
                f"no Dask scheduler answers at {address} ({error or 'timed out'}); start one with `dask scheduler`"
            ) from None
        self._check_workers(address)
        self._executor = self._client.get_executor(pure=False)
        self.width = max(1, sum(self._client.nthreads().values()))

    def _check_workers(self, address: str) -> None:
        from importlib.metadata import version

        found = self._client.run(_worker_version)
        if not found:
            self._client.close()
            raise RooftraceError(f"the Dask scheduler at {address} has no workers; start some with `dask worker`")
        ours = version("rooftrace")
        wrong = {worker: theirs for worker, theirs in found.items() if theirs != ours}
        if wrong:
            worker, theirs = next(iter(wrong.items()))
            self._client.close()
            raise RooftraceError(
                f"worker {worker} has rooftrace {theirs or 'not installed'}, this machine {ours}; "
                "install the same version everywhere"
            )

    def submit(self, batch: Sequence[tuple[str, Scenario]]) -> Future[list[Outcome]]:
        return self._executor.submit(run_batch, batch, None)

    def died(self, error: BaseException) -> bool:
        from distributed import KilledWorker

        return isinstance(error, KilledWorker)

    def restart(self) -> None:
        pass

    def close(self, *, now: bool) -> None:
        self._executor.shutdown(wait=not now)
        self._client.close()


def _worker_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rooftrace")
    except PackageNotFoundError:
        return ""


def execute(runs: Iterator[Run], store: Store, backend: Backend, on_outcome: Callable[[Outcome], None]) -> None:
    """Run all of *runs* that have a scenario, storing each; *on_outcome* hears of each as it ends.

    At most two batches a process are under way, so that memory does not grow with the number of runs. When a process
    dies, the runs that it may have died of are tried once more, each alone; those that kill it again are failures.
    """
    waiting: collections.deque[Run] = collections.deque()
    suspects: collections.deque[Run] = collections.deque()
    under_way: dict[Future[list[Outcome]], list[Run]] = {}
    source = iter(runs)
    size = 1

    def submit(batch: list[Run]) -> None:
        pairs = [(run.key, run.scenario) for run in batch if run.scenario is not None]
        under_way[backend.submit(pairs)] = batch

    def finish(outcome: Outcome) -> None:
        if outcome.record is not None:
            store.put(outcome.key, outcome.record)
        on_outcome(outcome)

    try:
        while True:
            while not suspects and len(under_way) < 2 * backend.width:
                batch = [waiting.popleft() for _ in range(min(size, len(waiting)))]
                batch += itertools.islice(source, size - len(batch))
                if not batch:
                    break
                submit(batch)
            alone = bool(suspects) and not under_way
            if alone:
                submit([suspects.popleft()])
            if not under_way:
                break
            ended, _ = wait(under_way, return_when=FIRST_COMPLETED)
            lost: list[list[Run]] = []
            for future in ended:
                batch = under_way.pop(future)
                try:
                    outcomes = future.result()
                except BaseException as error:
                    if not backend.died(error):
                        raise
                    lost.append(batch)
                    continue
                for outcome in outcomes:
                    finish(outcome)
                spent = sum(outcome.seconds for outcome in outcomes)
                each = spent / len(outcomes)
                size = max(1, min(MAX_BATCH, 2 * size, int(BATCH_S / max(each, 1e-4))))
            if not lost:
                continue
            if alone:
                (run,) = lost[0]
                assert run.scenario is not None
                base = {"key": run.key, "seed": run.scenario.seed, "settings": run.scenario.settings()}
                finish(Outcome(run.key, DIED, 0.0, json.dumps(failed(base, DIED))))
            else:
                if backend.folder is not None:
                    # A local pool ends as a whole, so what was under way elsewhere is lost with it.
                    lost += under_way.values()
                    under_way.clear()
                for batch in lost:
                    left = [run for run in batch if run.key not in store]
                    for run in batch:
                        if run.key in store:
                            finish(Outcome(run.key, store.get(run.key).get("error", ""), 0.0))
                    # Runs of a local batch are stored in order, so that the first without a record was being run.
                    n_suspect = 1 if backend.folder is not None else len(left)
                    suspects.extend(left[:n_suspect])
                    waiting.extend(left[n_suspect:])
            backend.restart()
    except BaseException:
        for future in under_way:
            future.cancel()
        backend.close(now=True)
        raise
    else:
        backend.close(now=False)
