"""`judge:PROMPT_FILE`: a language model behind any OpenAI endpoint gives the score of an answer.

The file (docs/how-to/reward.md) says whom to ask, how, and what a score looks like. A reply is parsed strictly: the
last line that begins with the file's `label` must be a number within the range, and there may be one such line only.
A file whose prompt has {other} compares two answers instead, for win rates (nanodag.evaluation.win_rate).
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nanodag.data.records import message_text
from nanodag.errors import ConfigError
from nanodag.registry import entry
from nanodag.rewards.remote import post_json
from nanodag.rewards.reward import Reward, plain_number

ASKED_AT_ONCE = 16
MAX_FILE_BYTES = 1 << 20


class Price(BaseModel):
    """Price of a million tokens, in any currency."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    input: float = Field(0.0, ge=0)
    output: float = Field(0.0, ge=0)


class JudgeFile(BaseModel):
    """Content of a prompt file. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    url: str = Field(pattern=r"^https?://")
    """Of the endpoint, with its version, as http://127.0.0.1:8000/v1."""
    model: str = Field(min_length=1)
    key_file: str = ""
    """A file with the key alone; none is sent without it."""
    system: str = ""
    prompt: str
    """With {response}, and where wanted {question}, {conversation}, {reference}. {other} makes it compare two answers:
    the reply says A for {response}, B for {other}, or tie."""
    label: str = "Score:"
    lowest: float = 0.0
    highest: float = 10.0
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    price: Price = Price()
    timeout_s: float = Field(60.0, gt=0)

    @model_validator(mode="after")
    def _has_sense(self) -> "JudgeFile":
        if "{response}" not in self.prompt:
            raise ValueError("prompt has no {response}, so that every answer would get the same score; put it in")
        if not self.lowest < self.highest:
            raise ValueError(f"lowest {self.lowest:g} must be below highest {self.highest:g}")
        if not self.label.strip() or "\n" in self.label:
            raise ValueError(f"label {self.label!r} must be a word or more of one line")
        return self

    @property
    def compares(self) -> bool:
        """True where it is shown two answers."""
        return "{other}" in self.prompt


def read_judge(path: str, *, compares: bool = False) -> JudgeFile:
    """The prompt file. compares: whether it has to compare two answers. Raises ConfigError with what is wrong in it."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"The judge's file {path} has more than {MAX_FILE_BYTES:,} bytes; it is read whole.")
        judge = JudgeFile.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"The judge's file {path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise ConfigError(f"The judge's file {path}: {place}: {first['msg']}") from error
    if judge.compares != compares:
        how = "needs {other} in its prompt" if compares else "has {other} in its prompt"
        raise ConfigError(
            f"The judge's file {path} {how}: a reward judges one answer, a benchmark's judge compares two."
        )
    return judge


@entry("reward", "judge", argument="file")
class Judge:
    """Asks the model of one file. The value goes from 0 (`lowest`) to 1 (`highest`).

    The component `price` is what this sample cost.
    """

    def __init__(self, path: str, compares: bool = False) -> None:
        self._file = read_judge(path, compares=compares)
        headers = {}
        if self._file.key_file:
            try:
                headers["Authorization"] = f"Bearer {Path(self._file.key_file).read_text(encoding='utf-8').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"The judge's key_file cannot be read: {error}") from error
        self._client = httpx.Client(timeout=self._file.timeout_s, headers=headers)

    def score_batch(self, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | str]:
        """The reward of each sample, or the reason why it has none."""
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            return list(threads.map(self._judged, samples))

    def preference(self, prompt: Mapping[str, Any], response: str, other: str) -> float | None:
        """1 where it prefers the response, 0 where the other answer, 0.5 for a tie, None for a reply without a verdict.
        Raises httpx.HTTPError where it cannot be asked."""
        try:
            verdict = verdict_in(self._reply(prompt, {"response": response, "other": other})[0], self._file)
        except ValueError:
            return None
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (400, 413, 422):  # of this pair, as one that is too long
                return None
            raise
        return {"a": 1.0, "tie": 0.5, "b": 0.0}.get(verdict.strip(" .*").lower())

    def _judged(self, sample: tuple[Mapping[str, Any], str]) -> Reward | str:
        prompt, response = sample
        try:
            text, paid = self._reply(prompt, {"response": response})
            return Reward(score_in(text, self._file), {"price": paid})
        except (httpx.HTTPError, ValueError) as error:
            return f"the judge {self._file.model}: {error}"

    def _reply(self, prompt: Mapping[str, Any], answers: Mapping[str, str]) -> tuple[str, float]:
        """Its reply, and the price of that. Raises httpx.HTTPError, ValueError for what is no whole reply."""
        file, url = self._file, f"{self._file.url.rstrip('/')}/chat/completions"
        messages = [{"role": "system", "content": file.system}] if file.system else []
        messages.append({"role": "user", "content": filled(file.prompt, {**_places(prompt), **answers})})
        body = {"model": file.model, "messages": messages, "temperature": file.temperature}
        answer = post_json(self._client, url, {**body, "max_tokens": file.max_tokens})
        text, _, ending, num_read, num_written = reply_of(answer)
        if ending == "length":
            raise ValueError("the reply was cut; raise max_tokens")
        return text, (num_read * file.price.input + num_written * file.price.output) / 1e6


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with {name} replaced. What a value itself spells in braces stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)


def verdict_in(reply: str, file: JudgeFile) -> str:
    """The text of a reply behind the file's label. Raises ValueError where that is missing or not alone."""
    lines = [line.strip() for line in reply.splitlines() if line.strip().startswith(file.label)]
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} lines of the reply begin with {file.label!r}, 1 is needed: {reply[-200:]!r}")
    return lines[0].removeprefix(file.label)


def score_in(reply: str, file: JudgeFile) -> float:
    """The score of a reply, from 0 to 1. Raises ValueError for one that is missing, not alone or out of range."""
    verdict = verdict_in(reply, file)
    number = plain_number(verdict)
    if number is None or not file.lowest <= number <= file.highest:
        raise ValueError(f"{file.label}{verdict!r:.100} holds no number from {file.lowest:g} to {file.highest:g}")
    return (float(number) - file.lowest) / (file.highest - file.lowest)


def reply_of(answer: Any) -> tuple[str, str, Literal["stop", "length"], int, int]:
    """Text of the first choice, thinking that the server tells apart, how it ended, and tokens read and written; of a
    chat or of a plain completion. Raises ValueError for what is no reply."""
    try:
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        message = choice["message"] if "message" in choice else {"content": choice["text"]}
        thinking = str(message.get("reasoning_content") or message.get("reasoning") or "")
        is_cut, text = choice.get("finish_reason") == "length", message["content"]
        if text is None and (thinking or is_cut):  # it did not come to an answer
            text = ""
        if not isinstance(text, str):
            raise TypeError(f"its content is {text!r:.80}")
        num_read, num_written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        return text, thinking, "length" if is_cut else "stop", num_read, num_written
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"answered with no completion: {error!r:.200} in {answer!s:.300}") from error


def _places(prompt: Mapping[str, Any]) -> dict[str, str]:
    """Texts for {question} (the last message of the user), {conversation} (all of them), {reference}."""
    messages = prompt.get("messages") or []
    questions = [message_text(message) for message in messages if message.get("role") == "user"]
    return {
        "question": questions[-1] if questions else "",
        "conversation": "\n\n".join(f"{message['role']}: {message_text(message)}" for message in messages),
        "reference": str(prompt.get("answer") or ""),
    }
