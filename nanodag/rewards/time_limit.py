"""The time limit of what a reward process scores, for rewards that wait for others and want to say so in time.

The asker ends the process at the limit. Should the asker be gone, the kernel does a little later: nothing handles
SIGALRM.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 5.0


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Bound what is done in here to so many seconds."""
    signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def left_s() -> float:
    """Seconds that are left, also below 0; infinite outside of a reward process."""
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    return left - GRACE_S if left else math.inf
