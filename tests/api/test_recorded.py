"""Requests as clients that nobody here wrote sent them (`recorded.json`: headers by client, bodies, what was said)."""

import json
from pathlib import Path

import pytest

from tests.api.said import said_app
from tests.api.scripted import ask, events

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))


def texts_of(reply, body):
    """What each choice said; a call as NAME(ARGUMENTS)."""
    parts = events(reply) if body.get("stream") else [reply.json()]
    texts: dict[int, str] = {}
    calls: dict[tuple[int, int], str] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        message = choice.get("delta") or choice.get("message") or {}
        text = (choice.get("text") or "") + (message.get("content") or "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        for place, call in enumerate(message.get("tool_calls") or []):  # streamed in pieces, the first with the name
            where, function = (choice["index"], call.get("index", place)), call["function"]
            begun = calls.get(where) or f"{function['name']}("
            calls[where] = begun + function["arguments"]
    return {index: text + "".join(f"{c})" for w, c in calls.items() if w[0] == index) for index, text in texts.items()}


@pytest.mark.parametrize("number", range(len(RECORDED["requests"])))
def test_a_recorded_request_is_answered(folder, hermes_folder, ids_of, number):
    request = RECORDED["requests"][number]
    app, _ = said_app(folder, hermes_folder, ids_of)
    body = request["body"]
    reply = ask(app, request["path"], body, headers=RECORDED["clients"][request["client"]])
    assert reply.status_code == 200, reply.text
    if request["said"] is None:  # likelihoods: a value for each token of the prompt, and one more
        scores = [choice["logprobs"]["token_logprobs"] for choice in reply.json()["choices"]]
        assert [len(one) for one in scores] == [len(prompt) + 1 for prompt in body["prompt"]]
        return
    prompts = body.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert texts_of(reply, body) == dict.fromkeys(range(body.get("n", 1) * several), request["said"])
