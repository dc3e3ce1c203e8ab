"""Comes up after a moment, then answers that it is healthy and that no flow run is under way."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(422 if "csrf-token" in self.path else 200, True)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, 0)

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    time.sleep(0.3)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
