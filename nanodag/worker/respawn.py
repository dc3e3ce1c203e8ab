"""Keeps one command running: `python -m nanodag.worker.respawn COMMAND...`.

The process that serves the flows may be killed, by hand or by the kernel for memory; without it a Retry in the UI waits
for ever. So it runs below this small one, which starts it again. A command that fails by itself within STEADY_S of its
start is not started again: the supervisor ends with its code. SIGTERM to the group ends both.
"""

import os
import signal
import sys
import threading
import time
from functools import partial

from nanodag.children.child import Child, start_child
from nanodag.children.tree import killed_with_parent

SERVING = "NANODAG_SERVING"  # in a flow's environment: the process that serves the flows
STEADY_S = 30.0
MAX_WAIT_S = 60.0
GRACE_S = 10.0


def main() -> int:
    stopping = threading.Event()
    child: list[Child] = []

    def stop(signum: int, frame: object) -> None:
        stopping.set()
        # As a rule the whole group got the signal; a second one would cut short what the first set going.
        late = threading.Timer(GRACE_S, lambda: child[0].send(signal.SIGTERM))
        late.daemon = True
        late.start()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    wait_s = 1.0
    while not stopping.is_set():
        began = time.monotonic()
        # In this process's group: who ends the supervisor's group ends both.
        begin = partial(killed_with_parent, os.getpid())
        child[:] = [start_child(sys.argv[1:], in_group=True, stdin=None, stdout=None, preexec_fn=begin)]
        while not child[0].wait(MAX_WAIT_S):
            pass
        code = child[0].code
        lived_s = time.monotonic() - began
        if code >= 0 and lived_s < STEADY_S:
            return code
        wait_s = 1.0 if lived_s > STEADY_S else min(2 * wait_s, MAX_WAIT_S)
        if not stopping.is_set():
            print(f"supervisor: the process ended ({code}) after {lived_s:.0f} s; starting it again", flush=True)
            stopping.wait(wait_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
