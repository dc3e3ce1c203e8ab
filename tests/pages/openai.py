"""A stand-in for the package `openai`, which is not installed: as much of its client as the pages use."""

import json
import urllib.request
from types import SimpleNamespace


class _Part(SimpleNamespace):
    def __getattr__(self, name):  # OpenAI's client has None for what an answer leaves out
        return None


def _read(text):
    return json.loads(text, object_hook=lambda table: _Part(**table))


class OpenAI:
    def __init__(self, *, base_url, api_key):
        self._url = f"{base_url}/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, **body):
        reply = urllib.request.urlopen(urllib.request.Request(self._url, json.dumps(body).encode(), self._headers))
        if not body.get("stream"):
            return _read(reply.read())
        events = (line.decode().removeprefix("data: ") for line in reply if line.startswith(b"data: {"))
        return (event for event in map(_read, events) if event.choices)
