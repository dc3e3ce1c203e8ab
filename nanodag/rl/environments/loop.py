"""The loop of a sample in an environment: the policy speaks, the environment answers, until one of them ends it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanodag.inference.seeds import derived_seed
from nanodag.registry import entry
from nanodag.rl.environments import observations, speech
from nanodag.rl.environments.observations import Earned, Heard, Message
from nanodag.rl.environments.processes import EnvironmentLost, Episode, Limits, process_of
from nanodag.rl.rollouts.metrics import METRICS, TURNS
from nanodag.rl.rollouts.turns.sample import Sample, TurnSampler
from nanodag.rl.rollouts.turns.transcript import Transcript

ROLE = "policy"  # of who speaks where the environment has no roles
ENDED = "ended"  # in the metadata: what ended the episode, `done`, `turns` or `tokens`
MAX_PLAYS = 4  # of a sample whose environment is killed by somebody else again and again
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
    talk = Talk(max_turns=max_turns, turn_tokens=turn_tokens)
    limits = Limits(step_s=step_s, cpu_s=cpu_s, max_bytes=max_bytes, max_processes=max_processes)
    process = process_of(named, options, limits)
    for number in range(1, MAX_PLAYS + 1):
        episode = process.episode()
        try:
            return await _Play(sampler, sample, episode, process.roles, talk).run()
        except EnvironmentLost:  # from the same seeds comes the same sample
            if number == MAX_PLAYS:
                raise
        finally:
            episode.close()
    raise AssertionError("the last play returns or raises")


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How long an episode may be; see `environment`."""

    max_turns: int
    turn_tokens: int


@dataclass(slots=True)
class _Speaker:
    """A role on its way through an episode. messages: its conversation. sampled: tokens of each answer and of those
    that it continues."""

    transcript: Transcript
    messages: list[Message] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)


class _Play:
    """One episode. roles: whether each is trained, the main one first."""

    def __init__(
        self, sampler: TurnSampler, sample: Sample, episode: Episode, roles: Mapping[str, bool], talk: Talk
    ) -> None:
        self._sampler, self._given, self._episode = sampler, sample, episode
        self._roles, self._talk = roles, talk
        self._names = list(roles)
        self._speakers: dict[str, _Speaker] = {}
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._stop_ids: list[int] = []
        self._earned = Earned()

    async def run(self) -> Sample:
        """The sample of the main role, with the others as branches."""
        ended, num_turns = "turns", 0
        heard = await self._begin()
        while num_turns < self._talk.max_turns:
            said = await self._spoken(heard, num_turns)
            if said is None:
                if not num_turns:
                    most = self._given.max_tokens
                    raise ValueError(f"the first observation leaves no room in a context of {most} tokens")
                ended = "tokens"
                break
            num_turns += 1
            told, is_cut = said
            heard_next, is_done = await self._stepped(heard.role, told, num_turns - 1, is_cut=is_cut)
            if is_done or is_cut:
                ended = "done" if is_done else "tokens"
                break
            assert heard_next is not None
            heard = heard_next
        metrics = observations.metrics_of((await self._episode.end()).get("metrics"))
        return self._sample({TURNS: num_turns, ENDED: ended, METRICS: metrics})

    async def _begin(self) -> Heard:
        seed = derived_seed("environment", str(self._given.record["prompt_id"]))
        answer = await self._episode.reset(seed=seed, record=self._given.record)
        self._tools = observations.tools_of(answer.get("tools"))
        self._stop_ids = speech.stop_ids(self._sampler, self._tools)
        return observations.heard(
            answer.get("observation"), roles=self._names, speaker=self._names[0], call_ids=(), may_be_none=True
        )

    async def _spoken(self, heard: Heard, number: int) -> "tuple[speech.Said, bool] | None":
        """What the role says that has heard this, and whether it was cut off; None where there is no room for it."""
        sampler, given = self._sampler, self._given
        speaker = self._speakers.get(heard.role)
        if speaker is None:
            speaker = self._speakers[heard.role] = _Speaker(Transcript(sampler.renderer, sampler.encoding))
        new = self._given.record["messages"] if heard.messages is None else heard.messages
        messages = [*([] if heard.is_anew else speaker.messages), *new]
        if sum(len(message["content"] or "") for message in new) > LONGEST_TOKEN * given.max_tokens:
            return None
        asked = speaker.transcript.asked(messages, self._tools)
        before = 0 if asked.sequence is None else speaker.sampled[asked.sequence]
        room = min(given.max_sampled - before, given.max_tokens - len(asked.ids))
        if room < 1:
            return None
        wanted = min(room, self._talk.turn_tokens or room)
        seed = asked.seed(derived_seed(given.seed, "role", heard.role))
        completion = await sampler.answer(asked.ids, seed=seed, max_tokens=wanted, stop_token_ids=self._stop_ids)
        told = speech.said(sampler, completion, speaker.transcript.text_of(completion), self._tools)
        message = told.message(number)
        speaker.transcript.answered(asked, completion, message)
        speaker.sampled.append(before + len(completion.output_ids))
        speaker.messages = [*messages, message]
        reason = completion.finish_reason
        return told, wanted == room and reason is not None and reason.type == "length"

    async def _stepped(
        self, role: str, told: speech.Said, number: int, *, is_cut: bool
    ) -> tuple[Heard | None, bool]:
        """What is heard of it, and whether the episode is over."""
        call_ids = told.call_ids(number)
        if wrong := told.wrong(self._tools):
            answers = [observations.tool_message(*pair) for pair in zip(call_ids, wrong, strict=True)]
            return Heard(role=role, messages=answers), False
        said_by = "" if "" in self._roles else role
        answer = await self._episode.step(text=told.text, calls=told.given(), is_cut=is_cut, role=said_by)
        self._earned.add(answer.get("reward"), answer.get("info"), self._names)
        done = answer.get("done")
        if not isinstance(done, bool):
            raise ValueError(f"done is {done!r:.80}; it must be true or false")
        if done or is_cut:
            return None, done
        found = answer.get("observation")
        return observations.heard(
            found, roles=self._names, speaker=role, call_ids=call_ids, may_be_none=False
        ), False

    def _sample(self, metadata: Mapping[str, Any]) -> Sample:
        main, spoke = self._names[0], [name for name in self._names if self._has_spoken(name)]
        if main not in spoke:
            raise ValueError(f"the role {main!r} did not speak: its rewards are the sample's")
        first, *others = [one for name in spoke for one in self._sequences(name)]
        return replace(
            first,
            branches=tuple(others),
            reward=self._earned.by_role.get(main, 0.0),
            components=dict(self._earned.components),
            metadata=metadata,
            finish_reason="length" if metadata[ENDED] != "done" else first.finish_reason,
        )

    def _has_spoken(self, name: str) -> bool:
        return name in self._speakers and bool(self._speakers[name].sampled)

    def _sequences(self, name: str) -> list[Sample]:
        """Those of a role, the one that it spoke in last first, with the role's reward."""
        first = self._speakers[name].transcript.sample(self._given)
        others = first.branches
        first, reward = replace(first, branches=()), self._earned.by_role.get(name)
        named = [replace(one, role=name or ROLE, is_trained=self._roles[name]) for one in (first, *others)]
        return [replace(named[0], reward=reward), *named[1:]]
