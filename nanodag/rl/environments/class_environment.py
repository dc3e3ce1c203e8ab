"""The loop of a sample in an environment: the policy speaks, the environment answers, until one of them ends it."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanodag.api.tool_format import knows_calls
from nanodag.children.forks import Fork, ForkLimits, shared_server
from nanodag.errors import ConfigError
from nanodag.host.threads import in_thread
from nanodag.inference.seeds import derived_seed
from nanodag.registry import entry
from nanodag.rl.environments.environment import MAKE, Earned, Heard, Message, heard, metrics_of, tool_message, tools_of
from nanodag.rl.environments.sample import Sample, TurnSampler, places
from nanodag.rl.environments.transcript import Conversation, arguments_of
from nanodag.rl.rollouts.rollout import METRICS, TURNS
from nanodag.tokenizer.chat import NativeRenderer

ROLE = "policy"  # of who speaks where the environment has no roles
ENDED = "ended"  # in the metadata: what ended the episode
Ended = Literal["done", "turns", "tokens"]
LONGEST_TOKEN = 64  # characters: what is longer than a context of these cannot fit, and is not made into tokens


@entry("generate", "environment", argument="function")
async def environment(
    sampler: TurnSampler,
    sample: Sample,
    *,
    named: str,
    max_turns: int = 16,
    turn_tokens: int = 0,
    step_s: float = 30.0,
    cpu_s: int = 600,
    max_bytes: int = 4 << 30,
    max_processes: int = 16,
    **options: Any,
) -> Sample:
    """An environment of yours, a class with `reset` and `step`, in processes of its own; further options are those of
    its constructor.

    max_turns: of an episode. turn_tokens: the most of a turn, 0 for no bound beside `max_new_tokens`; a turn that is
    cut off there is heard as it is. step_s: seconds that the environment may take for an answer. cpu_s, max_bytes: CPU
    time of an episode, and the address space of each of its processes. max_processes: that it may start.
    """
    bounds = {"max_turns": max_turns, "step_s": step_s, "cpu_s": cpu_s, "max_bytes": max_bytes}
    for name, value in bounds.items():
        if value <= 0:
            raise ConfigError(f"generate.options.{name} of {named} is {value}; it must be above 0")
    limits = ForkLimits(cpu_s=cpu_s, max_bytes=max_bytes, max_processes=max(1, max_processes))
    given = json.dumps({"path": named, "options": options}, sort_keys=True)
    server = shared_server(MAKE, given, limits, name=f"The environment {named!r}")
    with sampler.held():
        fork = await in_thread(server.fork)
    with closing(fork):
        return await _Play(sampler, sample, fork, server.about, max_turns, turn_tokens, step_s).run()


@dataclass(slots=True)
class _Play:
    """One episode. roles: whether each is trained, the main one first. The limits: as of `environment`. messages: of
    the conversation of each role that has spoken, as far as it is."""

    sampler: TurnSampler
    given: Sample
    fork: Fork
    roles: Mapping[str, bool]
    max_turns: int
    turn_tokens: int
    step_s: float
    tools: Sequence[Mapping[str, Any]] = ()
    conversations: dict[str, Conversation] = field(default_factory=dict)
    messages: dict[str, list[Message]] = field(default_factory=dict)
    earned: Earned = field(default_factory=Earned)

    async def run(self) -> Sample:
        """The sample of the main role, with the others as branches."""
        outcome: Heard | Ended = await self._begin()
        num_turns = 0
        while isinstance(outcome, Heard):
            if num_turns == self.max_turns:
                outcome = "turns"
            elif (message := await self._said(outcome)) is None:
                outcome = "tokens"
            else:
                outcome = await self._stepped(outcome.role, message)
                num_turns += 1
        if not num_turns:
            most = self.given.max_tokens
            raise ValueError(f"the first observation leaves no room in a context of {most} tokens")
        metrics = metrics_of((await self._asked("end")).get("metrics"))
        return self._sample(outcome, {TURNS: num_turns, ENDED: outcome, METRICS: metrics})

    async def _asked(self, name: str, **given: Any) -> dict[str, Any]:
        return await self.fork.ask({name: given}, self.step_s, name)

    async def _begin(self) -> Heard:
        seed = derived_seed("environment", str(self.given.record["prompt_id"]))
        answer = await self._asked("reset", seed=seed, record=dict(self.given.record))
        self.tools, renderer = tools_of(answer.get("tools")), self.sampler.renderer
        if self.tools and not knows_calls(renderer):
            raise ValueError("this model's chat template knows no tools, or writes calls in a form that is not known")
        if isinstance(renderer, NativeRenderer) and len(self.tools) > 1:
            raise ValueError(f"nanodag's own chat format has one tool, and the environment has {len(self.tools)}")
        roles = [*self.roles]
        return heard(answer.get("observation"), roles, roles[0], (), may_be_none=True)

    async def _said(self, observation: Heard) -> Message | None:
        """Answer of the role that hears an observation; None where there is no room for it."""
        sample, role = self.given, observation.role
        if role not in self.conversations:
            own = replace(sample, seed=derived_seed(sample.seed, "role", role))
            self.conversations[role] = Conversation(self.sampler, own, self.tools)
        new = sample.record["messages"] if observation.messages is None else observation.messages
        if observation.messages and sum(len(message["content"]) for message in new) > LONGEST_TOKEN * sample.max_tokens:
            return None
        messages = [*([] if observation.is_anew else self.messages.get(role, ())), *new]
        reply = await self.conversations[role].answer(messages, max_tokens=self.turn_tokens)
        if reply is not None:
            self.messages[role] = [*messages, reply]
        return reply

    async def _stepped(self, role: str, said: Message) -> Heard | Ended:
        """The observation after a turn, or what ended the episode."""
        tool_calls = said.get("tool_calls", ())
        call_ids = [call["id"] for call in tool_calls]
        mistakes = [_wrong(call, self.tools) for call in tool_calls]
        is_cut = self.conversations[role].is_cut
        if any(mistakes) and not is_cut:
            answers = [f"error: {what or 'not called, as another call is wrong'}" for what in mistakes]
            return Heard(role=role, messages=list(map(tool_message, call_ids, answers)))
        valid = [] if any(mistakes) else tool_calls
        calls = [{"name": call["function"]["name"], "arguments": arguments_of(call)} for call in valid]
        answer = await self._asked("step", text=said["content"], calls=calls, is_cut=is_cut, role=role)
        self.earned.add(answer.get("reward"), answer.get("info"), list(self.roles))
        done = answer.get("done")
        if not isinstance(done, bool):
            raise ValueError(f"done is {done!r:.80}; it must be true or false")
        if done or is_cut:
            return "done" if done else "tokens"
        return heard(answer.get("observation"), [*self.roles], role, call_ids, may_be_none=False)

    def _sample(self, ended: Ended, metadata: Mapping[str, Any]) -> Sample:
        main = next(iter(self.roles))
        if main not in self.messages:
            raise ValueError(f"the role {main!r} did not speak: its rewards are the sample's")
        spoke = [role for role in self.roles if role in self.messages]
        first, *others = [sequence for role in spoke for sequence in self._sequences(role)]
        return replace(
            first,
            branches=tuple(others),
            reward=self.earned.by_role.get(main, 0.0),
            components=dict(self.earned.components),
            metadata=metadata,
            finish_reason=first.finish_reason if ended == "done" else "length",
        )

    def _sequences(self, name: str) -> list[Sample]:
        """Sequences of a role, the one that it spoke in last first, with the role's reward."""
        sample = self.conversations[name].sample()
        said: dict[str, Any] = {"branches": (), "role": name or ROLE, "is_trained": self.roles[name]}
        first, *others = (replace(sequence, **said) for sequence in (sample, *sample.branches))
        return [replace(first, reward=self.earned.by_role.get(name)), *others]


@entry("generate", "openenv", argument="url")
async def openenv(
    sampler: TurnSampler,
    sample: Sample,
    *,
    named: str,
    max_turns: int = 16,
    step_s: float = 30.0,
    at_once: int = 64,
    action: str = "auto",
    observation: str = "auto",
) -> Sample:
    """An environment that an OpenEnv server runs, which you start yourself.

    max_turns: of an episode. step_s: seconds that the server may take for an answer. at_once: sessions, as many as the
    server allows (its `max_concurrent_envs`). action, observation: fields, as
    nanodag.rl.environments.openenv_session has them.
    """
    async with sampler.placed(places(f"openenv:{named}", at_once)):
        return await environment(
            sampler,
            sample,
            named="nanodag.rl.environments.openenv_session:OpenEnv",
            max_turns=max_turns,
            step_s=step_s,
            url=named,
            action=action,
            observation=observation,
        )


def _wrong(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """Why a call cannot be made; empty where it can."""
    name, names = call["function"]["name"], [tool["function"]["name"] for tool in tools]
    if name not in names:
        return f"there is no tool {name[:80]!r}; there is {', '.join(names)}"
    return "the arguments must be a JSON object" if arguments_of(call) is None else ""
