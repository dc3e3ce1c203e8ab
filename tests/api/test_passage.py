"""SGLang's own protocol on its way to an engine; the engine is played."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest

from nanodag.api.served_model import Limits
from nanodag.api.sglang_routes import passed_on
from nanodag.engines.fleet import Fleet
from tests.api.scripted import app_of, ask, model_of, refusal, scope_of


class Client:
    """Has an answer at once, which nobody may read."""

    def __init__(self, url):
        self.opened = []

    def begins_with(self, folder, version):
        """Whatever it is."""

    async def open(self, method, path, body):
        content = SimpleNamespace(iter_any=self.blocks)
        self.opened.append(SimpleNamespace(status=200, headers={}, content=content, close=lambda: None))
        return self.opened[-1]

    async def blocks(self):
        yield b"{}"

    async def close(self):
        pass


def engines_of():
    server = SimpleNamespace(url="", pid=1, is_alive=True, stop=lambda: None)
    return Fleet(model=None, version="1", launch=lambda *_: server, connect=Client, name="tiny", max_restarts=None)


def passed(folder, backend, limits):
    model = model_of(folder, backend)
    return app_of(model, limits=limits, engine_routes=passed_on({"tiny": model}, limits))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input_ids": [3, 4, 5]}, "A prompt has 3 tokens; this server takes 2"),
        ({"input_ids": [[3], [3, 4, 5]]}, "A prompt has 3 tokens"),
        ({"text": "one two three four"}, r"A prompt has \d+ tokens"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": 5}}, "max_new_tokens is 5"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": None}}, "max_new_tokens is None"),
        ({"input_ids": [3], "sampling_params": [{"max_new_tokens": 4}, {}]}, r"is 128 \(128 where it is not given\)"),
        ({"input_ids": [3], "sampling_params": None}, "max_new_tokens is 128"),
    ],
)
def test_the_limits_of_tokens_hold_for_sglangs_protocol(folder, body, said):
    given = {"sampling_params": {"max_new_tokens": 4}} | body
    app = passed(folder, engines_of(), Limits(max_prompt_tokens=2, max_new_tokens=4))
    error = refusal(ask(app, "/generate", given))
    assert re.search(said, error["message"])


def test_a_client_that_leaves_as_its_answer_begins_is_no_load_of_the_engine(folder):
    async def main():
        engines = engines_of()
        await engines.start(1)
        app = passed(folder, engines, Limits())
        body = json.dumps({"input_ids": [3], "sampling_params": {"n": 7}}).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message):  # to a connection whose buffer is full
            await asyncio.sleep(0.01)

        try:
            await app(scope_of("/generate"), receive, send)
            assert engines.load == 0
        finally:
            await engines.end()

    asyncio.run(main())
