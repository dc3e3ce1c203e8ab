"""How long a process that starts is waited for: while it works or logs, not while it is silent. Processes are real."""

import sys
import time

import psutil
import pytest

from nanodag.engines.start import ServerProcess
from nanodag.errors import SamplerLost
from nanodag.host.progress_timeout import Patience

WORKS = "while True: pass"
CHILD_WORKS = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {WORKS!r}])"
LOGS = "import time\nwhile True: print('.', flush=True); time.sleep(0.05)"
SLEEPS = "import time; time.sleep(60)"


@pytest.fixture
def start(tmp_path):
    started = []

    def spawn(code):
        command = [sys.executable, "-S", "-c", code]
        started.append(ServerProcess.spawn(command, log_path=tmp_path / "log", env={}))
        return started[-1]

    yield spawn
    for one in started:
        for process in [*psutil.Process(one.pid).children(), one]:
            process.kill()


@pytest.mark.parametrize("code", [WORKS, CHILD_WORKS, LOGS])
def test_who_works_or_logs_is_waited_for_longer_than_the_limit_but_not_for_ever(start, code, monkeypatch, tmp_path):
    monkeypatch.setattr("nanodag.host.progress_timeout.MAX_TIMES", 4.0)
    began, patience = time.monotonic(), Patience([start(code).pid], [tmp_path / "log"], 1.0)
    while not patience.is_over():
        time.sleep(0.05)
    assert 3.9 < time.monotonic() - began < 60 and "at work all the time" in str(patience)


def test_who_is_silent_is_given_up_and_the_setting_is_named(start):
    process = start(SLEEPS)
    with pytest.raises(SamplerLost, match=r"nothing for 1 s \(sampler.start_timeout_s is 0.8\)"):
        process.wait_until(lambda: False, 0.8)
