"""The time limit of what a reward process scores, for rewards that wait for others and want to say so in time.

The asker ends the process at the limit. Should the asker be gone, the kernel does a little later: nothing handles
SIGALRM.
"""

import math
import signal

GRACE_S = 5.0


def begin(limit_s: float) -> None:
    """Begin a limit of so many seconds."""
    signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)


def end() -> None:
    """End the limit."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def left_s() -> float:
    """Seconds that are left, also below 0; infinite outside of a reward process."""
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    return left - GRACE_S if left else math.inf
