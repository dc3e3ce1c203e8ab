"""How often those who read streams are told of what came."""

import time

REPORT_CPU_S = 60e-6
"""What telling of one stream costs this process, HTTP included: half a token of a model of 6 M parameters."""
MAX_REPORT_SHARE = 0.03
"""Of the engine's time, for streams whose parts are joined; many streams are told of less often, so that it holds."""
MAX_SILENCE_S = 0.5
"""Of a stream for the sake of that share."""


class StreamPace:
    """every_s: the least time between two reports; 0 for a report after every token. Many streams are told of less
    often, so that reports take no more than MAX_REPORT_SHARE of the engine's thread."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_at = self._told_at_cpu = 0.0  # when streams were told of last: clock, thread

    def is_due(self, num_streams: int) -> bool:
        """Whether all streams are told of now."""
        if not self._every_s:
            return True
        since_s, worked_s = time.monotonic() - self._told_at, time.thread_time() - self._told_at_cpu
        worth_s = num_streams * REPORT_CPU_S / MAX_REPORT_SHARE
        if since_s < self._every_s or (worked_s < worth_s and since_s < MAX_SILENCE_S):
            return False
        self._told_at, self._told_at_cpu = time.monotonic(), time.thread_time()
        return True
