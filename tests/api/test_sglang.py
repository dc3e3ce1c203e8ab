"""The API over SGLang on a CPU, and what SGLang alone has. Slow: a server takes a minute to start."""

import asyncio

import httpx
import pytest

from nanodag.api.application import application
from nanodag.api.command import parse_arguments
from nanodag.api.launching import served_model
from nanodag.api.served_model import Limits
from nanodag.api.sglang_routes import passed_on
from tests.evaluation.tiny import save_tiny_model
from tests.guest_pythons import sglang_python

pytestmark = pytest.mark.slow


def test_sglang_answers_by_the_same_api_and_holds_an_answer_to_a_schema(tmp_path):
    sglang_python()
    save_tiny_model(tmp_path, "qwen3")
    args = parse_arguments(["--engine", "sglang", "--device", "cpu", "--max-batch", "4", "--context-length", "160"])

    async def main():
        model = served_model(args, "tiny", tmp_path, "7", tmp_path, first=0, num_models=1)
        await model.backend.start(1)
        try:
            app = application({"tiny": model}, engine_routes=passed_on({"tiny": model}, Limits()))
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=120
            ) as client:
                await asked(client)
        finally:
            await model.backend.end()

    asyncio.run(main())


async def asked(client):
    body = {"prompt": [5, 17, 103], "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 2, "ignore_eos": True}
    reply = (await client.post("/v1/completions", json=body)).json()
    scores = reply["choices"][0]["logprobs"]
    assert reply["system_fingerprint"] == "7" and len(scores["tokens"]) == 7
    assert scores["token_logprobs"][0] is None and all(2 <= len(top) <= 3 for top in scores["top_logprobs"][1:])
    messages = [{"role": "user", "content": "hi"}]
    held = (await client.post("/v1/chat/completions", json={"messages": messages, "regex": "(yes|no)"})).json()
    assert held["choices"][0]["message"]["content"] in ("yes", "no"), held
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": messages, "max_tokens": 60, "response_format": wanted}
    reply = (await client.post("/v1/chat/completions", json=body)).json()
    # A random model may put in white space for ever.
    assert reply["choices"][0]["message"]["content"].split()[0].startswith("{"), reply
    body = {"messages": messages, "max_tokens": 20, "stream": True, "n": 2, "presence_penalty": 0.5}
    streamed = await client.post("/v1/chat/completions", json=body)
    assert streamed.text.endswith("data: [DONE]\n\n") and '"error"' not in streamed.text
    raw = (await client.post("/generate", json={"text": "the cat", "sampling_params": {"max_new_tokens": 3}})).json()
    assert len(raw["output_ids"]) == 3, raw
