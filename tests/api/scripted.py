"""An engine that says what a test wrote down, and how to ask an application in this process."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx

from nanodag.api.application import application
from nanodag.api.served_model import ServedModel, TokenText
from nanodag.inference.protocol import Completion, FinishReason, VersionSpan
from nanodag.tokenizer.chat import load_renderer


class Scripted:
    """A Backend. ids: what it says, a token at a time, cut by the request's own limits. pause_s: before each token.

    asked: the requests that came; num_open: those under way; error: raised after `error_at` tokens.
    """

    def __init__(self, ids: Sequence[int], *, pause_s=0.0, error=None, error_at=0, tops=0):
        self.ids, self.pause_s, self.error, self.error_at, self.tops = list(ids), pause_s, error, error_at, tops
        self.asked, self.num_open = [], 0
        self.is_ready, self.weight_version, self.num_restarts = True, "3", 0

    async def answer(self, request, *, stream):
        self.asked.append(request)
        self.num_open += 1
        try:
            stops = () if request.params.ignore_eos else request.params.stop_token_ids
            limit = request.params.max_new_tokens
            said = []
            for place, token in enumerate(self.ids):
                if self.error is not None and place == self.error_at:
                    raise self.error
                if len(said) == limit:
                    break
                await asyncio.sleep(self.pause_s)
                said.append(token)
                reason = FinishReason(type="stop", matched=token) if token in stops else None
                if stream or reason:
                    yield self._completion(request, said, reason)
                if reason:
                    return
            yield self._completion(request, said, FinishReason(type="length"))
        finally:
            self.num_open -= 1

    def _completion(self, request, said, reason):
        scores = [-0.5 * (place + 1) for place in range(len(said))] if request.return_logprob else []
        count = request.top_logprobs
        scored = request.input_ids if request.score_prompt else ()
        return Completion(
            rid="r",
            output_ids=list(said),
            logprobs=scores,
            finish_reason=reason,
            weight_version=self.weight_version,
            weight_versions=[VersionSpan(version="3", start=0, end=len(said))],
            num_prompt_tokens=len(request.input_ids),
            top_logprobs=[[(token, -0.1 * (n + 1)) for n, token in enumerate(range(count))] for _ in scores],
            prompt_ids=list(scored),
            prompt_logprobs=[None, *(-1.0 for _ in scored[1:])] if scored else [],
            prompt_top_logprobs=[None, *([(5, -0.2)] for _ in scored[1:])] if scored and count else [],
        )


def spelled(encoding, *pieces: str) -> list[int]:
    """spelled(encoding, "text", "<|end|>"): token ids, special tokens by their names."""
    ids = []
    for piece in pieces:
        is_special = piece.startswith("<|") and piece.endswith("|>")
        ids += [encoding.token_id(piece)] if is_special else encoding.encode(piece)
    return ids


def model_of(folder: Path, backend, *, name="tiny", context=200, **how) -> ServedModel:
    tokens = TokenText(folder)
    return ServedModel(
        name=name,
        tokens=tokens,
        renderer=load_renderer(folder),
        backend=backend,
        context_length=context,
        vocab_size=tokens.encoding.size,
        **how,
    )


def with_template(folder: Path, copy: Path, template: str, **settings) -> Path:
    """A copy of a tokenizer's folder that has another chat template."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template, **settings}))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    return copy


def app_of(*models, **how):
    return application({model.name: model for model in models}, **how)


def ask(app, path, body=None, *, headers=None, raw=None, host="localhost") -> httpx.Response:
    """POST a body, or GET without one."""

    async def main():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            if body is None and raw is None:
                return await client.get(path, headers=headers)
            content = raw if raw is not None else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(main())


def chat(app, content="hi", **body) -> httpx.Response:
    return ask(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **body})


def events(response: httpx.Response) -> list:
    """What a stream held, [DONE] left out."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(parts: list, index=0) -> str:
    """What a chat's stream said as that choice."""
    choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def scope_of(path) -> dict:
    """An ASGI server's description of a POST."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip


def refusal(response: httpx.Response, status=400) -> dict:
    """The error of a reply that has this status."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def tool(name, *arguments):
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


CALCULATOR, PYTHON = tool("calculator", "expression"), tool("python", "code")
