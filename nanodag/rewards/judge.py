"""`judge:PROMPT_FILE`: a language model behind any OpenAI endpoint gives the score of an answer.

The file (docs/how-to/reward.md) says whom to ask, how, and what a score looks like. A reply is parsed strictly: the
last line that begins with the file's `label` must be a number within the range, and there may be one such line only.
Replies are kept by what was asked and who was, so that a stage that goes on pays once.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nanodag.data.records import message_text
from nanodag.errors import ConfigError
from nanodag.host.folders import cache_folder
from nanodag.registry import entry
from nanodag.rewards.remote import get_json, post_json
from nanodag.rewards.reward import Reward, plain_number

ASKED_AT_ONCE = 16
PLACES = ("question", "conversation", "reference", "response")
MAX_FILE_BYTES = 1 << 20


class Price(BaseModel):
    """Of a million tokens, in any currency."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    input: float = Field(0.0, ge=0)
    output: float = Field(0.0, ge=0)


class JudgeFile(BaseModel):
    """What a prompt file says. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    url: str = Field(pattern=r"^https?://")
    """Of the endpoint, with its version, as http://127.0.0.1:8000/v1."""
    model: str = Field(min_length=1)
    key_file: str = ""
    """A file with the key alone; none is sent without it."""
    system: str = ""
    prompt: str
    """With {response}, and where wanted {question}, {conversation}, {reference}."""
    label: str = "Score:"
    lowest: float = 0.0
    highest: float = 10.0
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    price: Price = Price()
    labelled: str = ""
    """JSON lines of {"question", "response", "score"} and perhaps "reference", scored by people."""
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


def read_judge(path: str) -> JudgeFile:
    """The prompt file. Raises ConfigError with what is wrong in it."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"The judge's file {path} has more than {MAX_FILE_BYTES:,} bytes; it is read whole.")
        return JudgeFile.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"The judge's file {path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise ConfigError(f"The judge's file {path}: {place}: {first['msg']}") from error


@entry("reward", "judge", argument="file")
class Judge:
    """Asks the model of one file. The value goes from 0 (`lowest`) to 1 (`highest`).

    Components: price, of this sample; kept, 1 where its reply was known; agreement, where there is a labelled set: the
    share of its pairs of different scores that the judge orders alike, 0.5 for chance.
    """

    def __init__(self, path: str) -> None:
        self._file = read_judge(path)
        headers = {}
        if self._file.key_file:
            try:
                headers["Authorization"] = f"Bearer {Path(self._file.key_file).read_text(encoding='utf-8').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"The judge's key_file cannot be read: {error}") from error
        self._client = httpx.Client(timeout=self._file.timeout_s, headers=headers)
        self._kept = _Kept(cache_folder() / "judged.sqlite")
        self._identity: list[Any] | None = None
        self._agreement: float | None = None
        if self._file.labelled:
            self._agreement = self._agreed(_labelled(self._file.labelled))

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> Reward:
        """The reward of one answer. Raises ValueError with the reason."""
        (outcome,) = self.score_batch([(prompt, completion)])
        if isinstance(outcome, str):
            raise ValueError(outcome)
        return outcome

    def score_batch(self, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | str]:
        """The reward of each sample, or the reason why it has none."""
        return self._all([(_places(prompt), text) for prompt, text in samples])

    def _all(self, samples: Sequence[tuple[Mapping[str, str], str]]) -> list[Reward | str]:
        # Asked here, not when the process is started: a server that is lost then fails samples, and not the stage.
        if self._identity is None:
            try:
                self._identity = self._behind_the_name()
            except httpx.HTTPError as error:
                return [self._why(error)] * len(samples)
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            return list(threads.map(self._judged, samples))

    def _judged(self, sample: tuple[Mapping[str, str], str]) -> Reward | str:
        places, response = sample
        try:
            value, components = self._score(places, response)
        except (httpx.HTTPError, ValueError) as error:
            return self._why(error)
        if self._agreement is not None:
            components["agreement"] = self._agreement
        return Reward(value, components)

    def _why(self, error: Exception) -> str:
        return f"the judge {self._file.model}: {error}"

    def _score(self, places: Mapping[str, str], response: str) -> tuple[float, dict[str, float]]:
        body = self._asked(places, response)
        digest = hashlib.sha256(json.dumps([self._file.url, self._identity, body], sort_keys=True).encode()).hexdigest()
        reply = self._kept.get(digest)
        was_kept = reply is not None
        if reply is None:
            reply = _reply_of(post_json(self._client, f"{self._file.url.rstrip('/')}/chat/completions", body))
        value = score_in(reply["text"], self._file)
        if not was_kept:  # one that cannot be parsed is asked again
            self._kept.put(digest, reply)
        price = self._file.price
        paid = 0.0 if was_kept else (reply["input"] * price.input + reply["output"] * price.output) / 1e6
        return value, {"price": paid, "kept": float(was_kept)}

    def _behind_the_name(self) -> list[Any]:
        """The folder and version of the model's weights, where the server says them, as `nanodag serve` does: another
        checkpoint under the same name is another judge. Raises httpx.HTTPError for a server that is lost."""
        try:
            card = get_json(self._client, f"{self._file.url.rstrip('/')}/models/{self._file.model}")
        except ValueError:  # no JSON: it lists no models
            return []
        return [card.get("root"), card.get("weight_version")] if isinstance(card, dict) else []

    def _asked(self, places: Mapping[str, str], response: str) -> dict[str, Any]:
        file = self._file
        messages = [{"role": "system", "content": file.system}] if file.system else []
        messages.append({"role": "user", "content": filled(file.prompt, {**places, "response": response})})
        return {
            "model": file.model,
            "messages": messages,
            "temperature": file.temperature,
            "max_tokens": file.max_tokens,
        }

    def _agreed(self, labelled: Sequence[tuple[Mapping[str, str], str, float]]) -> float:
        found = self._all([(places, response) for places, response, _ in labelled])
        if reasons := [outcome for outcome in found if isinstance(outcome, str)]:
            raise ValueError(f"{len(reasons)} of {len(found)} labelled answers got no score: {reasons[0]}")
        judged = [outcome.value for outcome in found if isinstance(outcome, Reward)]
        return agreement(judged, [score for _, _, score in labelled])


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with {name} replaced. What a value itself spells in braces stays as it is."""
    rest, parts = template, list[str]()
    while True:
        found = [(rest.find("{" + name + "}"), name) for name in PLACES]
        at, name = min((place for place in found if place[0] >= 0), default=(-1, ""))
        if at < 0:
            return "".join([*parts, rest])
        parts += [rest[:at], values[name]]
        rest = rest[at + len(name) + 2 :]


def score_in(reply: str, file: JudgeFile) -> float:
    """The score of a reply, from 0 to 1. Raises ValueError for one that is missing, not alone or out of range."""
    lines = [line.strip() for line in reply.splitlines() if line.strip().startswith(file.label)]
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} lines of the reply begin with {file.label!r}, 1 is needed: {reply[-200:]!r}")
    number = plain_number(lines[0].removeprefix(file.label))
    if number is None or not file.lowest <= number <= file.highest:
        raise ValueError(f"{lines[0]!r:.100} holds no number from {file.lowest:g} to {file.highest:g}")
    return (float(number) - file.lowest) / (file.highest - file.lowest)


def agreement(judged: Sequence[float], given: Sequence[float]) -> float:
    """The share of pairs with different given scores that are ordered alike; a pair that is judged equal counts half.

    Raises ValueError where all given scores are equal.
    """
    pairs = [(i, j) for i in range(len(given)) for j in range(i) if given[i] != given[j]]
    if not pairs:
        raise ValueError("the labelled set has no two answers of different scores; add some")
    signs = ((judged[i] - judged[j]) * (1 if given[i] > given[j] else -1) for i, j in pairs)
    return fmean(1.0 if sign > 0 else 0.5 if sign == 0 else 0.0 for sign in signs)


class _Kept:
    """Replies by the digest of what was asked, in one file that several processes share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as opened:
            opened.execute("CREATE TABLE IF NOT EXISTS replies (digest TEXT PRIMARY KEY, reply TEXT NOT NULL)")

    def get(self, digest: str) -> dict[str, Any] | None:
        with self._open() as opened:
            row = opened.execute("SELECT reply FROM replies WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, digest: str, reply: Mapping[str, Any]) -> None:
        with self._open() as opened:
            opened.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (digest, json.dumps(reply)))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        opened = sqlite3.connect(self._path, timeout=30.0)
        try:
            with opened:  # commits
                yield opened
        finally:
            opened.close()


def _reply_of(answer: Any) -> dict[str, Any]:
    """Text and token counts. Raises ValueError for what is no reply."""
    try:
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"its content is {text!r:.80}")
        if choice.get("finish_reason") == "length":
            raise ValueError("the reply was cut; raise max_tokens")
        return {
            "text": text,
            "input": int(usage.get("prompt_tokens", 0)),
            "output": int(usage.get("completion_tokens", 0)),
        }
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"answered with no chat completion: {error!r:.200}") from error


def _places(prompt: Mapping[str, Any]) -> dict[str, str]:
    """What stands for {question} (the last message of the user), {conversation} (all of them), {reference}."""
    messages = prompt.get("messages") or []
    asked = [message_text(message) for message in messages if message.get("role") == "user"]
    return {
        "question": asked[-1] if asked else "",
        "conversation": "\n\n".join(f"{message['role']}: {message_text(message)}" for message in messages),
        "reference": str(prompt.get("answer") or ""),
    }


def _labelled(path: str) -> list[tuple[dict[str, str], str, float]]:
    """Places, answers and people's scores. Raises ValueError with the line that is wrong."""
    found = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                places = {"question": str(row["question"]), "reference": str(row.get("reference", ""))}
                places["conversation"] = f"user: {places['question']}"
                found.append((places, str(row["response"]), float(row["score"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}, is no labelled answer: {error!r:.100}") from error
    return found
