"""Processes that compute rewards, each sample under a time limit, beside generation. No torch here.

A sample whose reward raises, hangs, eats the memory or kills its process fails with the reason, and the process is
replaced. Processes talk JSON lines over sockets of their own, so a reward that prints breaks nothing.
"""

import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

from nanodag import registry as entries
from nanodag.children.child import start_child
from nanodag.errors import ConfigError
from nanodag.rewards import sandbox
from nanodag.rewards.reward import Reward
from nanodag.rewards.text_rewards import REPORTED

START_TIMEOUT_S = 120.0
MAX_BYTES = 4 << 30  # address space of a process; none for a reward model
MAX_TOGETHER = {"remote:": 32, "judge:": 32, "model:": 256}
"""Samples that a process is given together, of rewards that take many at once."""


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
        self._is_closed, self._lock = False, Lock()
        self._processes: list[_Process] = []
        self._free: list[_Process] = []
        self._waiting: deque[list[_Sample]] = deque()
        self._threads, self._num_processes = ThreadPoolExecutor(num_processes), num_processes

    def submit_group(
        self,
        prompt: Mapping[str, Any],
        completions: Sequence[str],
        *,
        reported: Sequence[Mapping[str, Any] | None] = (),
    ) -> "list[Future[Reward | str]]":
        """Score the answers to one prompt, each by itself unless their reward compares them (`group:`): the reward, or
        the reason why there is none. reported: what was reported of each, for the reward `reported`. Raises ConfigError
        when the reward does not exist, MissingTool when it needs a sandbox and there is none."""
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
            self._waiting.append(lot)
            self._threads.submit(self._serve)
        return [sample.future for sample in samples]

    def close(self) -> None:
        """End the processes. What waits is cancelled; what they are at fails, as nobody knows how long it takes."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:  # whoever waits for one finds that it has ended
                process.child.send(signal.SIGKILL)
        self._threads.shutdown()
        for process in self._processes:
            process.child.kill()

    def _serve(self) -> None:
        """The next samples to a process that is free, its answers to their futures."""
        samples = self._next()
        if self._is_closed:
            for sample in samples:
                sample.future.cancel()
        samples = [sample for sample in samples if sample.future.set_running_or_notify_cancel()]
        if not samples:
            return
        try:
            with self._lock:
                if not self._free:
                    self._free.append(_Process(self._options, self._how, self._timeout_s, self._max_bytes))
                    self._processes += self._free
                process = self._free.pop()
                if self._is_closed:  # by now; `close` may not have seen this one
                    process.child.send(signal.SIGKILL)
            try:
                scores = process.score(samples)
            except _Lost as lost:
                with self._lock:  # `close` may be walking through them
                    self._processes.remove(process)
                scores = [str(lost)] * len(samples)
            finally:
                self._free += [process] if process in self._processes else []
            for sample, score in zip(samples, scores, strict=True):
                sample.future.set_result(score)
        except Exception as error:  # noqa: BLE001 - whoever waits for these samples must hear of it
            for sample in samples:
                sample.future.set_exception(error)

    def _next(self) -> "list[_Sample]":
        """Samples that a process gets together: one, a group whose reward compares its members, or a process's share of
        those that wait for the same rewards of MAX_TOGETHER. None where others took them."""
        with self._lock:
            share = -(-len(self._waiting) // self._num_processes)
            samples = list(self._waiting.popleft()) if self._waiting else []
            weights = samples[0].weights if samples else {}
            most = max((size for prefix, size in MAX_TOGETHER.items() if _has(weights, prefix)), default=1)
            while not _has(weights, "group:") and len(samples) < min(most, share) and self._waiting:
                if self._waiting[0][0].weights != weights:
                    break
                samples += self._waiting.popleft()
        return samples


@dataclass(frozen=True, slots=True)
class _Sample:
    """weights: by reward."""

    weights: dict[str, float]
    prompt: dict[str, Any]
    completion: str
    future: "Future[Reward | str]"


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

    def score(self, samples: Sequence[_Sample]) -> list[Reward | str]:
        """Rewards of samples with the same weights. Raises _Lost with their reason, ConfigError when a reward cannot be
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
        return [reply["error"] if "error" in reply else Reward(**reply) for reply in answers]

    def _request(self, message: Mapping[str, Any], timeout_s: float, what: str) -> Any:
        try:
            return self.child.ask(message, timeout_s)
        except TimeoutError:
            self.child.kill()
            raise _Lost(f"{what} took longer than {timeout_s:g} s") from None
        except ConnectionError:
            raise _Lost(f"{what}: its process {self.child.how_ended()}") from None
