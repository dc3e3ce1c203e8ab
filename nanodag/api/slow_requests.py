"""Connections whose client does not send a whole request: uvicorn alone would keep them for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

LOOK_EVERY_S = 30.0  # a request that is not whole at two looks in a row is given up


class WholeRequests(H11Protocol):
    """uvicorn's protocol, but that a connection is closed on which a request takes too long to arrive."""

    _next_look: asyncio.TimerHandle
    _seen: Any = ""  # the cycle that was waited for at the last look; None is one: nothing was sent yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._next_look = self.loop.call_later(LOOK_EVERY_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        is_whole = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if not is_whole and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = "" if is_whole else self.cycle
        self._next_look = self.loop.call_later(LOOK_EVERY_S, self._look)
