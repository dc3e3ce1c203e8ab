"""A process that speaks sglang-router's protocol: `fake_router.py PORT`. Each prompt goes to the next server."""

import contextlib
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

servers: dict[str, str] = {}
lock = threading.Lock()
count = 0


def take(name: str, url: str) -> None:
    """Add a server once it says that it is well, as the real router does."""
    while True:
        with contextlib.suppress(OSError):  # 503 is one, too
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            break
        time.sleep(0.05)
    servers[name] = url


class Handler(BaseHTTPRequestHandler):
    """Reading a server's answer, it fails with 500 as the real one does when the server is gone."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *unused: object) -> None:
        pass

    def reply(self, code: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        workers = [{"id": name, "url": url} for name, url in servers.items()]
        self.reply(200, {"workers": workers} if self.path == "/workers" else "OK")

    def do_DELETE(self) -> None:
        servers.pop(self.path.removeprefix("/workers/"), None)
        self.reply(202, {})

    def do_POST(self) -> None:
        global count
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/workers":
            url = json.loads(body)["url"]
            threading.Thread(target=take, args=(f"w{len(servers)}-{count}", url), daemon=True).start()
            return self.reply(202, {})
        if not isinstance(json.loads(body).get("rid", ""), str):
            return self.reply(422, {"error": "rid: expected a string"})
        with lock:
            count += 1
            urls = sorted(servers.values())
        if not urls:
            return self.reply(503, {"error": "no available workers"})
        request = urllib.request.Request(f"{urls[count % len(urls)]}/generate", data=body, method="POST")
        try:
            with urllib.request.urlopen(request) as answer:
                self.reply(200, json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            self.reply(error.code, json.loads(error.read()))
        except OSError as error:
            self.reply(500, {"error": str(error)})


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.serve_forever()
