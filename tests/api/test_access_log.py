"""What the log says of requests and of speed."""

import asyncio
import logging
import re
from types import SimpleNamespace

import pytest

from nanodag.api.choice import SampledChoice
from nanodag.api.command import parse_arguments
from nanodag.api.metrics import Metrics, log_speed
from nanodag.inference.protocol import Request
from tests.api.scripted import Scripted, app_of, ask, chat, model_of


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="nanodag.api.metrics")
    return lambda: [re.sub(r"\d+\.\d{3} s", "T s", record.message) for record in caplog.records]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_the_tokens_of_its_prompt_and_answers(saying, lines, stream):
    app, backend = saying("a b", "<|end|>")
    chat(app, n=2, stream=stream)
    num_prompt = len(backend.asked[0].input_ids)
    assert lines() == [f"POST /v1/chat/completions 200 T s {num_prompt} + {2 * len(backend.ids)} tokens"]


def test_what_the_doors_refuse_has_a_line_and_no_path_begins_another(folder, lines):
    app = app_of(model_of(folder, Scripted([])), keys=["a-key-of-24-characters-."])
    ask(app, "/v1/models")
    ask(app, "/a%0aPOST%20/forged%20200%1b[2J")
    assert lines() == ["GET /v1/models 401 T s", r"GET /a\nPOST /forged 200\x1b[2J 401 T s"]


def test_tokens_a_second_are_logged_while_there_are_any_and_count_the_time_of_an_answer_that_is_no_stream(lines):
    metrics = Metrics({"tiny": SimpleNamespace(backend=Scripted([]))})
    answer = SimpleNamespace(num_tokens=0, finish_reason="stop")
    sample = SampledChoice(index=0, request=Request(input_ids=[1]), answer=answer)

    async def main():
        logging_speed = asyncio.ensure_future(log_speed(metrics, every_s=0.1))
        with metrics.counted("tiny", [sample]):
            await asyncio.sleep(0.35)  # three looks at which nothing has come
            answer.num_tokens = 100
            while not lines():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # idle
        logging_speed.cancel()

    asyncio.run(main())
    (line,) = lines()
    speed, rest = line.split(" ", 1)
    assert rest == "tokens a second, 1 answer under way" and float(speed) < 290  # 100 in 0.35 s or more, not in 0.1


def test_the_log_may_be_switched_off():
    assert parse_arguments(["--no-access-log"]).no_access_log and not parse_arguments([]).no_access_log
