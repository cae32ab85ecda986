"""An exception of a signal's handler (Ctrl-C) ends a run and nothing else, wherever it comes: compiled modules too raise it."""

import subprocess
import sys

INTERRUPTED = """
import signal
from rooftrace import Scenario, simulate

def interrupt(*_):
    raise KeyboardInterrupt

def answer(requests):
    return simulate(Scenario.default().with_set(f"workload.requests={requests}")).summary["ttft_s"]

expected = answer(20)
signal.signal(signal.SIGALRM, interrupt)
ended = 0
for hundredths in range(2, 22, 2):
    try:
        signal.setitimer(signal.ITIMER_REAL, hundredths / 100)
        answer(100_000)
    except KeyboardInterrupt:
        ended += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
assert answer(20) == expected
print(ended)
"""


def test_an_exception_of_a_signal_ends_the_run_and_not_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
