"""Time limit for a process that starts: it is waited for as long as it gets on.

On a machine that is busy with other work a start may take many times its usual time, and a limit of wall time would end
it just before it is up. So what counts is silence: no processor time used and no line logged.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

LOOK_EVERY_S = 1.0
LEAST_CPU_S = 0.05  # what counts as getting on
MAX_TIMES = 10.0  # a process that is up and idle uses some processor time for ever


class Patience:
    """Runs out once none of these processes, nor their children, got on for `silence_s`; at last after MAX_TIMES of
    that. logs: what they write to."""

    def __init__(self, pids: Iterable[int], logs: Sequence[Path], silence_s: float) -> None:
        self._pids, self._logs, self._silence_s = list(pids), logs, silence_s
        self._began = self._looked = self._got_on = time.monotonic()
        self._cpu_s, self._logged = self._now()

    def is_over(self) -> bool:
        """True when they need not be waited for any longer."""
        now = time.monotonic()
        if now - self._looked >= min(LOOK_EVERY_S, self._silence_s / 4):
            self._looked = now
            cpu_s, logged = self._now()
            if abs(cpu_s - self._cpu_s) >= LEAST_CPU_S or logged != self._logged:  # less, when a child has ended
                self._cpu_s, self._logged, self._got_on = cpu_s, logged, now
        return now - self._got_on > self._silence_s or now - self._began > MAX_TIMES * self._silence_s

    def __str__(self) -> str:
        """For how long, and why no longer: part of an error's message."""
        waited_s = time.monotonic() - self._began
        silent_s = time.monotonic() - self._got_on
        what = f"used no processor time and logged nothing for {silent_s:.0f} s"
        return f"waited {waited_s:.0f} s; it {what if silent_s > self._silence_s else 'was at work all the time'}"

    def _now(self) -> tuple[float, int]:
        cpu_s = 0.0
        for pid in self._pids:
            with suppress(psutil.Error):
                first = psutil.Process(pid)
                for process in [first, *first.children(recursive=True)]:
                    with suppress(psutil.Error):
                        cpu_s += sum(process.cpu_times()[:4])  # its own, and that of children which have ended
        return cpu_s, sum(path.stat().st_size for path in self._logs if path.exists())
