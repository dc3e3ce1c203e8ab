"""Prefect's server, its UI talking to it alone: `python -m flows.prefect_server start`, as `prefect server start`.

Whoever may create flow runs runs code here, so no web page may. Prefect's own settings, which
nanodag.server.local_server gives it, see to other origins: no CORS, and a CSRF token for whatever changes something.
What Prefect has no setting for is done here: a name other than those of NANODAG_HOSTS is refused, as a page's name may
lead to this machine (DNS rebinding), and so is a websocket that a page of another origin opens, as a browser asks
nobody before it does. Transactions in SQLite wait for each other (write_at_once).

The V2 UI of Prefect 3.8.8 loads its configuration of Amplitude, with the browser's address, whatever the server's
analytics setting says. It does so for one key; in the copy that this server serves (PREFECT_UI_STATIC_DIRECTORY) that
key is empty, for which the UI leaves analytics out altogether.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefect.server.api import server
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

AMPLITUDE_KEY = "c97dd2acbf306ab7bf54aca0aeb7ffa1"


def without_key(folder: Path) -> None:
    """Empty the key in every script below a folder."""
    for path in folder.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        if AMPLITUDE_KEY in text:
            path.write_text(text.replace(AMPLITUDE_KEY, ""), encoding="utf-8")


class OwnPagesOnly:
    """Refuses websockets that a page opens unless it was loaded from here, or from one of the hosts (a proxy's)."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "websocket" else {}
        if (origin := headers.get("origin")) is not None:  # programs send none
            page = urlsplit(origin)
            if page.netloc != headers.get("host") and page.hostname not in self._hosts:
                await WebSocketClose(code=1008, reason="opened by a page of another origin")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def guarded(app: ASGIApp, hosts: Sequence[str], proxies: Sequence[str]) -> ASGIApp:
    """The app for those who call it by one of these names. proxies: those of them that a proxy offers it under."""
    inner = OwnPagesOnly(app, proxies)
    return TrustedHostMiddleware(inner, allowed_hosts=[*hosts, *proxies], www_redirect=False)


def write_at_once() -> None:
    """Begin every transaction of SQLite's as one that writes, so that it waits for its turn (60 s at most).

    Prefect 3.8.8 begins many that write as readers. Where another has written meanwhile, SQLite refuses such a one at
    once, whatever its busy timeout ("database is locked"): a 503, at which its UI says Oops. There is no setting.
    """
    begin = AioSqliteConfiguration.begin_transaction

    def begin_transaction(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AbstractAsyncContextManager[AsyncSessionTransaction]:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_transaction  # type: ignore[method-assign]


def main() -> None:
    write_at_once()
    copy = server.copy_directory

    def copied(directory: str, path: str) -> None:
        copy(directory, path)
        without_key(Path(path))

    server.copy_directory = copied
    create = server.create_app
    hosts, proxies = (os.environ[name].split() for name in ("NANODAG_HOSTS", "NANODAG_PROXIES"))

    def created(*args: Any, **options: Any) -> ASGIApp:
        app = create(*args, **options)
        is_for_all = options.get("final", False)  # the server asks itself too, in memory
        return guarded(app, hosts, proxies) if is_for_all else app

    server.create_app = created
    sys.argv[:1] = ["prefect", "server"]
    runpy.run_module("prefect", run_name="__main__")


if __name__ == "__main__":
    main()
