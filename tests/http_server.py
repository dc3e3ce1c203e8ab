"""An HTTP server of a test's own, on this machine, as long as a block lasts."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """Writes no log."""

    def log_message(self, *unused: Any) -> None:
        pass

    def answer(self, content: Any = None, status: int = 200) -> None:
        """content: sent as JSON, None for an empty body."""
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def content(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The address of a server with that handler. port: 0 for any that is free."""
    server = HTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def listening(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """The address of a server that keeps what is posted to it, and what it has."""
    posted: list[Any] = []

    class Listener(Quiet):
        def do_POST(self) -> None:
            posted.append(self.content())
            self.answer(status=status)

    with serving(Listener) as url:
        yield url, posted
