"""Over machines: a real Dask scheduler with two workers, of which one is killed in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from sim import RooftraceError, Scenario, sweep

BASE = Scenario.default().with_set("scheduler={policy: sarathi}", "workload.limit=150")

# Dask leaves sockets and event loops to the garbage collector when a worker is killed; not ours to mend.
pytestmark = [pytest.mark.slow(reason="processes are started and ended"), pytest.mark.filterwarnings("ignore")]

SERVER = """
import time
from distributed import LocalCluster
if __name__ == "__main__":
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
    print(cluster.scheduler_address, *(worker.pid for worker in cluster.workers.values()), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def cluster(tmp_path):
    """Address of a scheduler, and the process ids of its two workers."""
    pytest.importorskip("distributed", reason="needs the extra [distributed]")
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    )
    address, *pids = process.stdout.readline().split()
    yield address, [int(pid) for pid in pids]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_worker_killed_in_the_middle_changes_nothing_in_the_table(cluster, tmp_path):
    address, pids = cluster
    axes = {"workload.rate_scale": "0.5:2.5:10", "scheduler.token_budget": [256, 512, 768]}
    killed_at = []

    def report(progress):
        if progress.done >= 15 and not killed_at:
            os.kill(pids[0], signal.SIGKILL)
            killed_at.append(progress.done)

    result = sweep(BASE, axes=axes, replications=2, out=tmp_path / "cluster", cluster=address, progress=report)
    assert 15 <= killed_at[0] < 60
    assert result.failures() == []
    alone = sweep(BASE, axes=axes, replications=2, out=tmp_path / "alone", jobs=1)
    assert result.counts == alone.counts
    assert result.counts["runs"] == 60
    pd.testing.assert_frame_equal(result.table, alone.table)
    # What is finished is found again, by whatever runs it.
    seen = []
    sweep(BASE, axes=axes, replications=2, out=tmp_path / "cluster", cluster=address, progress=seen.append)
    assert seen[-1].reused == 60


def test_a_scheduler_that_does_not_answer_is_one_sentence(tmp_path):
    pytest.importorskip("distributed", reason="needs the extra [distributed]")
    with pytest.raises(RooftraceError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        sweep(BASE, axes={"replicas": [1]}, out=tmp_path, cluster="tcp://127.0.0.1:9")
