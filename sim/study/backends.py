"""Where runs of a study are run: this process, processes of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from sim.errors import RooftraceError
from sim.processes import ProcessPool
from sim.scenario import Scenario
from sim.study.records import Outcome, run_batch


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
    """*jobs* processes of this machine."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self.width = jobs
        self.folder: str | None = str(folder)
        self._pool = ProcessPool(jobs)

    def submit(self, batch: Sequence[tuple[str, Scenario]]) -> Future[list[Outcome]]:
        return self._pool.submit(run_batch, batch, self.folder, os.getpid())

    def died(self, error: BaseException) -> bool:
        return isinstance(error, BrokenExecutor)

    def restart(self) -> None:
        self.close(now=True)

    def close(self, *, now: bool) -> None:
        self._pool.close(now=now)


class Cluster:
    """The workers of a running Dask scheduler. Records come back to this machine, which stores them."""

    folder: str | None = None

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            raise RooftraceError("--cluster needs Dask: pip install distributed") from None
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
    try:
        return version("rooftrace")
    except PackageNotFoundError:
        return ""
