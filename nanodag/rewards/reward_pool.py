"""Processes that compute rewards, each sample under a time limit, beside generation. No torch here.

A sample whose reward raises, hangs, eats the memory or kills its process fails with the reason, and the process is
replaced. Processes talk JSON lines over sockets of their own, so a reward that prints breaks nothing.
"""

import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nanodag import registry as entries
from nanodag.children.child import start_child
from nanodag.errors import ConfigError
from nanodag.rewards import sandbox
from nanodag.rewards.text_rewards import REPORTED

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
MAX_BYTES = 4 << 30  # address space of a process; none for a reward model
MAX_TOGETHER = 32
ASKED_TOGETHER = ("remote:", "judge:")  # rewards that another machine computes


@dataclass(frozen=True, slots=True)
class SampleReward:
    """The reward of one sample. value None: it failed, and `error` says why. steps: as
    nanodag.rewards.function_rewards has them, None where the reward is of another kind."""

    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    steps: Sequence[tuple[int, float]] | None = None


class RewardPool:
    """Scores samples in `num_processes` processes.

    reward: `auto` for each prompt's own (`prompt["reward"]`), another name for all, or names with weights. how: the
    sum of these, or `min`. options: by name. A name that does not exist raises ConfigError when the pool is made, one
    that cannot be imported when it is first used. timeout_s: for each sample, from when a process takes it.
    """

    def __init__(
        self,
        reward: str | Mapping[str, float] = "auto",
        *,
        how: str = "sum",
        options: Mapping[str, Mapping[str, Any]] | None = None,
        num_processes: int = 1,
        timeout_s: float = 10.0,
    ) -> None:
        self._weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
        self._options = {name: dict((options or {}).get(name, {})) for name in self._weights}
        for name in self._weights:
            if name != "auto":
                entries.find("reward", name)
        self._timeout_s, self._how = timeout_s, how
        self._max_bytes = 0 if any(name.startswith("model:") for name in self._weights) else MAX_BYTES
        self._is_closed = False
        self._processes: list[_Process] = []
        self._waiting: queue.SimpleQueue[list[_Sample] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_processes)]
        for thread in self._threads:
            thread.start()

    def submit_group(
        self,
        prompt: Mapping[str, Any],
        completions: Sequence[str],
        *,
        reported: Sequence[Mapping[str, Any] | None] = (),
    ) -> "list[Future[SampleReward]]":
        """Score the answers to one prompt, each by itself unless their reward compares them (`group:`). reported: what
        was reported of each, for the reward `reported`. Raises ConfigError when the reward does not exist, MissingTool
        when it needs a sandbox and there is none."""
        weights: dict[str, float] = {}
        for name, weight in self._weights.items():
            reward = prompt["reward"] if name == "auto" else name
            traits = entries.find("reward", reward)
            if traits is not None and traits.needs_sandbox:
                sandbox.walls()  # here and not in each sample: a machine without walls is no failure of samples
            if name == "auto":
                entries.check_reward_of_data(reward, "name it as the stage's `reward`")
            weights[reward] = weights.get(reward, 0.0) + weight
        records = [{**prompt, REPORTED: report} for report in reported or [None] * len(completions)]
        pairs = zip(records, completions, strict=True)
        samples = [_Sample(weights, record, completion, Future()) for record, completion in pairs]
        for lot in [samples] if samples and _has(weights, "group:") else [[sample] for sample in samples]:
            self._waiting.put(lot)
        return [sample.future for sample in samples]

    def close(self) -> None:
        """End the processes. What waits is cancelled; what they are at fails, as nobody knows how long it takes."""
        self._is_closed = True
        for _ in self._threads:
            self._waiting.put(None)
        for process in list(self._processes):  # whoever waits for one finds that it has ended
            process.child.send(signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """One thread, one process at a time: the next samples to it, its answers to their futures."""
        process: _Process | None = None
        held: deque[list[_Sample]] = deque()
        while samples := self._next(held):
            if self._is_closed:
                for sample in samples:
                    sample.future.cancel()
            samples = [sample for sample in samples if sample.future.set_running_or_notify_cancel()]
            if not samples:
                continue
            try:
                if process is None:
                    process = _Process(self._options, self._how, self._timeout_s, self._max_bytes)
                    self._processes.append(process)
                    if self._is_closed:  # by now; `close` may not have seen this one
                        process.child.send(signal.SIGKILL)
                for sample, score in zip(samples, process.score(samples), strict=True):
                    sample.future.set_result(score)
            except _Lost as lost:
                assert process is not None
                self._processes.remove(process)
                process = None
                for sample in samples:
                    sample.future.set_result(SampleReward(error=str(lost)))
            except Exception as error:  # noqa: BLE001 - whoever waits for these samples must hear of it
                for sample in samples:
                    sample.future.set_exception(error)
        if process is not None:
            process.child.hang_up(END_TIMEOUT_S)

    def _next(self, held: "deque[list[_Sample]]") -> "list[_Sample]":
        """The samples that go to a process together: one, a group whose reward compares its members, or where another
        machine computes it all that wait, up to MAX_TOGETHER. held: taken, but not for this time. Empty at the end."""
        first = held.popleft() if held else self._waiting.get()
        if first is None:
            return []
        samples, weights = list(first), first[0].weights
        goes_together = any(_has(weights, prefix) for prefix in ASKED_TOGETHER) and not _has(weights, "group:")
        with suppress(queue.Empty):
            while goes_together and len(samples) < MAX_TOGETHER:
                other = self._waiting.get_nowait()
                if other is None:
                    self._waiting.put(None)
                    break
                if other[0].weights != weights:
                    held.append(other)
                    break
                samples += other
        return samples


@dataclass(frozen=True, slots=True)
class _Sample:
    """weights: by reward."""

    weights: dict[str, float]
    prompt: dict[str, Any]
    completion: str
    future: "Future[SampleReward]"


def _has(weights: Mapping[str, float], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in weights)


class _Lost(Exception):
    """The process ended or was ended; the message is the sample's reason."""


class _Process:
    def __init__(self, options: Mapping[str, Mapping[str, Any]], how: str, timeout_s: float, max_bytes: int) -> None:
        self._options, self._how, self._timeout_s = options, how, timeout_s
        command = [sys.executable, "-m", "nanodag.rewards.pool_process", str(timeout_s), str(max_bytes)]
        self.child = start_child(command, has_line=True, in_group=True)
        self._loaded: set[str] = set()

    def score(self, samples: Sequence[_Sample]) -> list[SampleReward]:
        """Scores of samples with the same weights. Raises _Lost with their reason, ConfigError when a reward cannot be
        imported."""
        weights = samples[0].weights
        for name in weights.keys() - self._loaded:
            message = {"load": name, "options": self._options.get(name, {})}
            error = self._request(message, START_TIMEOUT_S, f"importing the reward {name}").get("error")
            if error:
                raise ConfigError(f"The reward {name!r} cannot be used: {error}")
            self._loaded.add(name)
        pairs = [[sample.prompt, sample.completion] for sample in samples]
        question = {"score": weights, "how": self._how, "samples": pairs}
        answers = self._request(question, self._timeout_s * len(samples), f"the reward {' + '.join(weights)}")
        if isinstance(answers, dict):  # a function ended the interpreter, or returned what is no JSON
            answers = [answers] * len(samples)
        return [SampleReward(**reply) for reply in answers]

    def _request(self, message: Mapping[str, Any], timeout_s: float, what: str) -> Any:
        try:
            return self.child.ask(message, timeout_s)
        except TimeoutError:
            self.child.kill()
            raise _Lost(f"{what} took longer than {timeout_s:g} s") from None
        except ConnectionError:
            raise _Lost(f"{what}: its process {self.child.how_ended()}") from None
