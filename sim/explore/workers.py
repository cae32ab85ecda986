"""Processes that are kept warm for the questions of the page, and what they are doing: taken, handed back, killed.

A fork server imports everything once, so that a new process is there in milliseconds; one whose work is superseded is killed, and
another takes its place. One process answers nothing but what has to be quick, so that long work never stands in its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing as mp
import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from sim.errors import RooftraceError
from sim.packages import home

Lane = Literal["quick", "exact", "behind"]
"""Jobs that have to answer at once; those that somebody waits for; the rest, which leaves one process to the others."""
_WARM = "sim.explore.warm"
_END = "end of the job"
_MOST_JOBS = 400
"""Jobs after which a process makes room for a fresh one, so that its memory stays bounded."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Event(NamedTuple):
    """One thing that a job has to say; the job goes on."""

    name: str
    data: Mapping[str, Any]


Job = Callable[[], Iterator[tuple[str, Mapping[str, Any]]]]
"""A function of `sim.explore.work` with its arguments, which travels to another process."""


class Died(RooftraceError):
    """The process that carried a job out is no more."""


def _context() -> Any:
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    return mp.get_context(method)


def prepare() -> None:
    """Begin to import, in a process of its own, what workers need; returns at once."""
    for name in _THREADS:
        os.environ.setdefault(name, "1")
    if "forkserver" in mp.get_all_start_methods():
        _context().set_forkserver_preload([_WARM])
        forkserver.ensure_running()


def _serve(pipe: Connection) -> None:
    """Carry out jobs from *pipe* until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal's whole group: the server ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            job: Job = pipe.recv()
            known = set(sys.modules)
            try:
                for name, data in job():
                    pipe.send((name, data))
            except RooftraceError as error:
                pipe.send(("refused", {"sentence": str(error), **getattr(error, "facts", {})}))
            except Exception as error:
                # A policy of the user's own, or a defect of ours: the page says what happened and goes on; the traceback is on the
                # standard error of the server.
                traceback.print_exc()
                pipe.send(("refused", {"sentence": f"{type(error).__name__}: {error}"}))
            pipe.send((_END, {"whole": not _loaded_own_code(known)}))


def _loaded_own_code(known: set[str]) -> bool:
    """Whether modules beyond *known* are of no installed package: policies of the user's own, which may be edited meanwhile."""
    ours = (str(home() / name) + os.sep for name in ("hwmodels", "policies", "sim", "workloads"))
    homes = (*ours, *sysconfig.get_paths().values())
    files = (getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - known)
    return any(not file.startswith(homes) for file in files if file)


class _Process:
    """One process, and this end of the pipe to it."""

    def __init__(self) -> None:
        context = _context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.jobs = 0
        self._ended = False

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class Workers:
    """One process for quick answers and *n* for others."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._threads = ThreadPoolExecutor(2 * n + 4, thread_name_prefix="explore")
        self._idle: dict[bool, list[_Process]] = {True: [], False: []}
        self._all: set[_Process] = set()
        self._changed = asyncio.Condition()
        self._waiting = 0
        """Jobs of lane `exact` that wait for a process; those behind let them go first."""
        self._behind = 0
        """Processes that are at work for lane `behind`."""
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def processes(self) -> list[int]:
        """The ids of the processes that are there."""
        return [pid for each in self._all if (pid := each.process.pid) is not None]

    async def start(self) -> None:
        await asyncio.gather(self._add(True), *(self._add(False) for _ in range(self._n)))

    async def events(self, lane: Lane, job: Job, *, most_s: float) -> AsyncGenerator[Event, None]:
        """The events of *job*, as they come. Where nobody listens any more, or after *most_s*, the process that does it is
        killed."""
        process = await self._take(lane)
        over = False
        until = asyncio.get_running_loop().time() + most_s
        try:
            await self._in_thread(process.pipe.send, job)
            while (said := Event(*await self._said(process, until))).name != _END:
                yield said
            over = bool(said.data["whole"])
        except TimeoutError:
            raise RooftraceError(f"it took more than {most_s:g} s and was stopped; ask for less") from None
        except (EOFError, OSError):
            raise Died("the process that ran it died; it may have run out of memory") from None
        finally:
            process.jobs += 1
            self._hand_back(process, lane, whole=over and process.jobs < _MOST_JOBS)

    async def _said(self, process: _Process, until: float) -> Any:
        async with asyncio.timeout_at(until):
            return await self._in_thread(process.pipe.recv)

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        for task in list(self._replacing):
            with contextlib.suppress(Exception):
                await task
        await asyncio.gather(*(self._in_thread(each.end) for each in list(self._all)))
        self._all.clear()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *args))

    async def _add(self, quick: bool) -> None:
        process = await self._in_thread(_Process)
        self._all.add(process)
        self._idle[quick].append(process)
        async with self._changed:
            self._changed.notify_all()

    async def _take(self, lane: Lane) -> _Process:
        quick = lane == "quick"
        idle = self._idle[quick]

        def free() -> bool:
            if lane == "behind" and (self._waiting or self._behind >= max(1, self._n - 1)):
                return False
            return bool(idle)

        async with self._changed:
            self._waiting += lane == "exact"
            try:
                await self._changed.wait_for(free)
                self._behind += lane == "behind"
                return idle.pop()
            finally:
                self._waiting -= lane == "exact"
                self._changed.notify_all()

    def _hand_back(self, process: _Process, lane: Lane, *, whole: bool) -> None:
        """*process* for the next job, or another in its place where it is not *whole* any more. Not to be cancelled: a task."""
        self._behind -= lane == "behind"
        task = asyncio.create_task(self._replace(process, lane == "quick", whole))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, process: _Process, quick: bool, whole: bool) -> None:
        if self._closed:
            return  # all processes are ended there
        if whole:
            self._idle[quick].append(process)
            async with self._changed:
                self._changed.notify_all()
            return
        self._all.discard(process)
        await self._in_thread(process.end)
        if not self._closed:
            await self._add(quick)


async def merged(*sources: AsyncGenerator[Event, None]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all *sources* as they come, each with the number of its source; all end with the first error, or when nobody
    listens any more."""
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()

    async def fill(i: int, source: AsyncGenerator[Event, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for event in source:
                    queue.put_nowait((i, event))
        except Exception as error:
            queue.put_nowait((i, error))
        else:
            queue.put_nowait((i, None))

    tasks = [asyncio.create_task(fill(i, source)) for i, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            i, said = await queue.get()
            if isinstance(said, Exception):
                raise said
            if said is None:
                left -= 1
            else:
                yield i, said
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
