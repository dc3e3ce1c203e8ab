"""Environments: what they answer, the processes that they run in, and the loop of a sample. The sampler is a fake."""

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from nanodag import registry
from nanodag.children import forks
from nanodag.children.forks import EpisodeFailed, ForkServer, Limits
from nanodag.children.tree import descendants
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ConfigError, StageFailed
from nanodag.inference.protocol import Completion, FinishReason, VersionSpan
from nanodag.rewards.reward_pool import RewardPool
from nanodag.rl.control.generation import RolloutGenerator, check_failures
from nanodag.rl.environments.environment import (
    MAKE,
    Action,
    Earned,
    ToolCall,
    heard,
    metrics_of,
    number,
    roles_of,
    tools_of,
)
from nanodag.rl.environments.examples.rooms import Rooms
from nanodag.rl.environments.examples.search import Search
from nanodag.rl.environments.runner import Turns
from nanodag.rl.rollouts.metrics import rollout_metrics
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import Rollout
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from tests.rl import worlds
from tests.rl.stages import BYTES, VOCABULARY
from tests.rl.templates import QWEN25, renderer_of

CONTEXT = 256
LIMITS = Limits(cpu_s=20, max_bytes=worlds.MAX_BYTES, max_processes=8)
STEP_S = 20.0
NO_RECORD = {"prompt_id": "p", "messages": [{"role": "user", "content": "hi"}], "answer": ""}


def world(name: str) -> str:
    """A class of `worlds`, or one that is named in full."""
    return f"environment:{name}" if ":" in name else f"environment:{worlds.__name__}:{name}"


def server_of(path: str, **options) -> ForkServer:
    path = path if ":" in path else f"{worlds.__name__}:{path}"
    return ForkServer(MAKE, {"path": path, "options": options}, LIMITS, name="it")


@pytest.fixture(scope="module")
def hostile():
    server = server_of("Hostile")
    yield server
    server.close()


async def played(server: ForkServer, way: str, steps: int = 3, step_s: float = STEP_S) -> list[dict]:
    fork = server.fork()
    try:
        answers = [await fork.ask({"reset": {"seed": 1, "record": {**NO_RECORD, "answer": way}}}, step_s, "reset")]
        for _ in range(steps):
            step = {"text": "a", "calls": [], "is_cut": False, "role": ""}
            answers.append(await fork.ask({"step": step}, step_s, "step"))
        return answers
    finally:
        fork.close()


REASONS = {
    "raises": "KeyError: 'none'",
    "exits": "SystemExit: 3",
    "dies": "ended with code 7",
    "leaks": "MemoryError",
    "forks": "more than 8 processes",
    "floods": "more than 4194304 bytes",
    "closes": "ended with code 1",
    "crashes": "SIGSEGV",
    "answers a set": "set is not JSON serializable",
    "rewards NaN": "not JSON compliant",
}


def test_an_episode_that_goes_wrong_says_how_leaves_no_process_and_touches_no_other(hostile):
    async def all_of_them():
        ways = ["fine", *REASONS, "leaves a daemon", "fine"]
        return await asyncio.gather(*(played(hostile, way) for way in ways), return_exceptions=True)

    first, *found, daemon, last = asyncio.run(all_of_them())
    assert first == last and first[-1]["done"] is True and daemon[-1]["observation"] == "ok"
    for outcome, (way, reason) in zip(found, REASONS.items(), strict=True):
        assert isinstance(outcome, EpisodeFailed) and reason in str(outcome), (way, outcome)
    deadline = time.monotonic() + 20
    while (left := list(descendants(hostile.pid))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_process_that_the_environment_starts_when_it_is_made_lives_as_long_as_it():
    process = server_of("Unmade", how="forks")
    asyncio.run(played(process, ""))
    helper = min(psutil.Process(process.pid).children(), key=lambda one: one.create_time())
    assert helper.is_running()  # an episode may be there, too, which is not yet reaped
    process.close()
    assert not helper.is_running()


def test_an_episode_that_hangs_is_ended_after_its_time(hostile):
    with pytest.raises(EpisodeFailed, match=r"step took longer than 0.5 s"):
        asyncio.run(played(hostile, "sleeps", step_s=0.5))


def test_what_a_failed_episode_printed_last_is_kept(hostile):
    with pytest.raises(EpisodeFailed, match="step: RuntimeError: told") as failed:
        asyncio.run(played(hostile, "says why"))
    assert failed.value.last_words == "2\n3\n4\n5\n6"


def test_a_process_that_is_killed_is_started_again():
    process = server_of("Hostile")
    asyncio.run(played(process, "leaves a daemon", steps=1))
    os.kill(before := process.pid, 9)
    assert process._child.wait(20)
    assert asyncio.run(played(process, "fine"))[-1]["done"] is True  # another one took its place
    assert process.pid != before
    process.close()


def test_each_episode_begins_with_the_environment_as_it_was_made_and_with_the_same_random_numbers():
    process = server_of("Echo", rounds=5)
    process.fork().close()
    assert "rounds" not in " ".join(psutil.Process(process.pid).cmdline()), "anybody may read it"
    one, other = (asyncio.run(played(process, "")) for _ in range(2))
    process.close()
    assert one == other and one[1]["info"]["components"]["noise"] != one[2]["info"]["components"]["noise"]


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        ("Unmade", {"how": "raises"}, "RuntimeError: no luck"),
        ("Unmade", {"how": "dies"}, "ended with code 7 when it was made"),
        ("Unmade", {"how": ""}, "none of them is trained"),
        ("Echo", {"turns": 3}, "unexpected keyword argument 'turns'"),
        ("Nothing", {}, "has no attribute 'Nothing'"),
        ("ways", {}, "it has no method reset"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_error_of_the_config(path, options, reason):
    process = server_of(path, **options)
    for _ in range(2):  # the second time it is not tried again
        with pytest.raises(ConfigError, match=reason):
            process.fork()
    assert process.pid == 0


def hear(found, **given):
    return heard(found, **({"roles": ["a", "b"], "speaker": "a", "call_ids": (), "may_be_none": False} | given))


def test_an_observation_is_a_text_texts_or_messages_for_one_role():
    assert hear("hi").messages == [{"role": "user", "content": "hi"}]
    assert hear("4", call_ids=["c0"]).messages == [{"role": "tool", "tool_call_id": "c0", "content": "4"}]
    assert [one["tool_call_id"] for one in hear(["4", "5"], call_ids=["c0", "c1"]).messages] == ["c0", "c1"]
    mixed = [{"role": "tool", "content": "4"}, {"role": "user", "content": "go on"}]
    assert [one["role"] for one in hear(mixed, call_ids=["c0"]).messages] == ["tool", "user"]
    told = hear({"to": "b", "messages": "judge", "anew": True}, call_ids=["c0"])
    assert (told.role, told.is_anew, told.messages) == ("b", True, [{"role": "user", "content": "judge"}])
    assert hear(None, may_be_none=True).messages is None


@pytest.mark.parametrize(
    ("found", "given", "reason"),
    [
        (3, {}, "an observation is a text"),
        (None, {}, "an observation is a text"),
        ([], {}, "an observation is a text"),
        (["4"], {"call_ids": ["c0", "c1"]}, "2 calls were answered by 1 texts"),
        ({"to": "c", "messages": "x"}, {}, "roles are a, b"),
        ({"messages": "x"}, {}, "an observation has `to`"),
        ([{"role": "assistant", "content": "x"}], {}, "a message has a role"),
        ([{"role": "user", "content": 3}], {}, "a message has a role"),
        ([{"role": "tool", "content": "x"}], {}, "more messages of the role tool than calls"),
    ],
)
def test_what_is_no_observation_is_refused(found, given, reason):
    with pytest.raises(ValueError, match=reason):
        hear(found, **given)


def test_rewards_add_up_by_role_and_only_finite_numbers_are_taken():
    earned = Earned()
    earned.add(0.5, {"components": {"part": 1.0}}, ["a", "b"])
    earned.add({"a": 0.25, "b": -1}, {"components": {"part": 2.0}}, ["a", "b"])
    assert earned.by_role == {"a": 0.75, "b": -1.0} and earned.components == {"part": 3.0}
    for reward in (float("nan"), "1", True, None, {"c": 1.0}):
        with pytest.raises(ValueError, match=r"the reward|the role 'c'"):
            earned.add(reward, {}, ["a", "b"])
    for wrong in (lambda: metrics_of([1]), lambda: tools_of([{"type": "x"}]), lambda: roles_of({"": True})):
        with pytest.raises(ValueError):
            wrong()
    assert number(2, "x") == 2.0 and roles_of(None) == {"": True}


# The loop of a sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(BYTES, folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def end_what_was_started():
    yield
    forks.end_all()


class Policy:
    """A sampler that says what `says(text of the prompt)` gives: a text that ends with <|end|> or a call's end."""

    def __init__(self, folder, says) -> None:
        self.encoding, self.says, self.requests = Encoding(folder), says, []
        self.special = {self.encoding.decode([token]): token for token in self.encoding.special_ids}

    def ids(self, text: str) -> list[int]:
        parts = re.split(r"(<\|\w+\|>)", text)
        return [one for part in parts for one in ([self.special[part]] if part in self.special else self._bytes(part))]

    def _bytes(self, text: str) -> list[int]:
        return self.encoding.encode(text) if text else []

    async def generate(self, requests):
        self.requests += requests
        return [[self.completion(request)] for request in requests]

    def completion(self, request) -> Completion:
        said = self.ids(self.says(self.encoding.decode(request.input_ids)))
        most = request.params.max_new_tokens
        kind = "stop" if len(said) <= most and said[-1] in request.params.stop_token_ids else "length"
        said = said[:most]
        return Completion(
            rid=request.rid,
            output_ids=said,
            logprobs=[-0.5] * len(said),
            finish_reason=FinishReason(type=kind),
            weight_version="3",
            weight_versions=[VersionSpan(version="3", start=0, end=len(said))],
            num_prompt_tokens=len(request.input_ids),
        )


def stage_in(name: str, options, **values) -> RLStage:
    """A stage whose samples act in one of these worlds."""
    base = {"kind": "rl", "data": ["file:x"], "seed": 5, "prompts_per_step": 1, "filters": [], "reward": "reported"}
    base |= {"generate": {"name": world(name), "options": options}, "sampler": {"context": CONTEXT, "max_batch": 16}}
    return RLStage.of(**(base | values))


def group_of(folder, says, name: str, *, answer="", most=64, samples=2, context=CONTEXT, **options):
    """The rollouts of one prompt with their rewards, and the sampler."""
    limits = {"step_s": 20.0, "max_bytes": worlds.MAX_BYTES, "max_processes": 8}
    sizes = {"samples_per_prompt": samples, "max_new_tokens": most, "sampler": {"context": context, "max_batch": 16}}
    stage = stage_in(name, {**limits, **options}, **sizes)
    sampler, renderer = Policy(folder, says), load_renderer(folder)
    turns = Turns(stage, sampler.encoding, renderer, context=context, vocabulary=sampler.encoding.size)
    messages = [{"role": "user", "content": "hi"}]
    record = {"prompt_id": "p", "messages": messages, "answer": answer, "reward": "auto"}
    prompt = Prompt(epoch=0, record=record, token_ids=tuple(renderer.prompt(messages)))
    with RewardPool("reported") as pool:
        generator = RolloutGenerator(stage, sampler, pool, sampler.encoding, renderer.stop_ids, turns)
        batch = asyncio.run(generator.group(prompt))
    return batch.all_rollouts, sampler


def spelled(sampler, rollout) -> list[tuple[str, str]]:
    return [(span.kind, sampler.encoding.decode(span.token_ids)) for span in rollout.spans]


def test_the_policy_and_the_environment_speak_in_turns_and_step_rewards_add_up(folder):
    rollouts, sampler = group_of(folder, lambda text: "ab<|end|>", "Echo")
    for rollout in rollouts:
        kinds = [kind for kind, _ in spelled(sampler, rollout)]
        assert kinds == ["prompt", "sampled", "tool", "sampled"]
        assert spelled(sampler, rollout)[0][1] == "<|bos|><|user|>hi<|end|><|assistant|>"
        assert spelled(sampler, rollout)[2][1] == "<|user|>ab!<|end|><|assistant|>"
        assert rollout.reward == 0.5 and rollout.reward_components["told"] == 0.5
        assert (rollout.metadata["turns"], rollout.metadata["ended"]) == (2, "done")
    one, other = rollouts
    assert one.metadata["metrics"] == other.metadata["metrics"]  # the same seed: that of the prompt
    metrics = rollout_metrics(rollouts)
    assert metrics["turns"] == 2 and metrics["metric_left"] == 0 and metrics["reward"] == 0.5


def test_an_environment_may_give_the_prompt_and_a_last_turn_that_is_cut_off_is_heard(folder):
    rollouts, sampler = group_of(folder, lambda text: "abcd<|end|>", "Echo", most=7, rounds=4, greeting="say")
    for rollout in rollouts:
        assert spelled(sampler, rollout)[0][1] == "<|bos|><|user|>say<|end|><|assistant|>"
        assert spelled(sampler, rollout)[-1] == ("sampled", "ab")
        assert rollout.metadata["ended"] == "tokens" and rollout.finish_reason == "length"
        assert rollout.reward == 0.5 and rollout.num_sampled == 7
    rollouts, sampler = group_of(folder, lambda text: "abcd<|end|>", "Echo", turn_tokens=3)
    between = "<|end|><|user|>abc!<|end|><|assistant|>"
    assert [said for _, said in spelled(sampler, rollouts[0])][1:] == ["abc", between, "abc"]
    rollouts, _ = group_of(folder, lambda text: "ab<|end|>", "Echo", rounds=9, max_turns=3)
    assert {(one.metadata["ended"], one.finish_reason, one.reward) for one in rollouts} == {("turns", "length", 0.75)}


def test_a_tool_call_is_answered_by_the_environment_within_the_turn(folder):
    call = "<|tool_call|>pears<|tool_call_end|>"
    says = lambda text: "5<|end|>" if "<|tool_result|>" in text else call  # noqa: E731
    rollouts, sampler = group_of(folder, says, "Shop")
    result = "<|tool_result|>5<|tool_result_end|>"
    for rollout in rollouts:
        assert spelled(sampler, rollout)[1:] == [("sampled", call), ("tool", result), ("sampled", "5<|end|>")]
        assert rollout.reward == 1.0


def test_a_call_that_is_wrong_is_answered_before_it_reaches_the_environment(tmp_path):
    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    right = call("price", '{"goods": "pears"}')
    turns = [call("cost", "{}") + right, call("price", '"pears"'), right, "5"]

    def says(text: str) -> str:
        return turns[text.count("<|im_start|>assistant") - 1] + "<|im_end|>"

    renderer_of(QWEN25, tmp_path)
    rollouts, sampler = group_of(tmp_path, says, "Shop", most=500, context=2000)
    for rollout in rollouts:
        tools = [text for kind, text in spelled(sampler, rollout) if kind == "tool"]
        assert "error: there is no tool 'cost'; there is price" in tools[0] and "not called, as another" in tools[0]
        assert "error: the arguments must be a JSON object" in tools[1] and "\n5\n" in tools[2]
        assert rollout.reward == 1.0 and rollout.metadata["turns"] == 4 and rollout.branch == 0


@pytest.mark.parametrize("judge_is_trained", [False, True])
def test_each_role_has_sequences_of_its_own_that_are_trained_or_not_with_rewards_of_its_own(folder, judge_is_trained):
    def says(text):
        if "<|user|>is " in text:
            return "yes<|end|>" if "is 22 good" in text else "no<|end|>"
        return "22<|end|>" if "once more" in text else "1<|end|>"

    rollouts, sampler = group_of(folder, says, "Court", judge_is_trained=judge_is_trained)
    solver, *judges = [one for one in rollouts if one.sample_index == 0]
    assert (solver.role, solver.branch, solver.reward) == ("solver", 0, 1.0)
    kinds = [kind for kind, _ in spelled(sampler, solver)]
    assert kinds == ["prompt", "sampled", "tool", "sampled"] and solver.num_trained == solver.num_sampled == 5
    assert sorted(spelled(sampler, judge)[1][1] for judge in judges) == ["no<|end|>", "yes<|end|>"]
    for judge in judges:  # it was asked anew each time: a sequence for each question
        assert judge.role == "judge" and judge.branch > 0 and judge.reward == 0.25
        assert judge.num_trained == (judge.num_sampled if judge_is_trained else 0)


def test_a_sample_whose_environment_fails_is_left_out_with_the_reason_and_too_many_end_the_stage(folder):
    assert len(group_of(folder, lambda text: "a<|end|>", "Hostile", samples=4)[0]) == 4
    for way in ("answers a number", "rewards a text", "is done perhaps", "knows no such role"):
        rollouts, _ = group_of(folder, lambda text: "a<|end|>", "Hostile", answer=way)
        assert all(rollout.finish_reason == "error" and rollout.reward is None for rollout in rollouts)
    reasons = [rollout.metadata["generate_error"] for rollout in rollouts]
    assert all("an observation is to 'nobody'" in reason for reason in reasons), reasons
    both = [*rollouts, *group_of(folder, lambda text: "a<|end|>", "Echo")[0]]
    with pytest.raises(StageFailed, match=r"2 of 4 samples of step 1 \(50.0%\).*max_failed_rewards 0.4"):
        check_failures(both, of="step 1", max_failed_rewards=0.4)


def test_an_episode_whose_process_somebody_kills_is_played_again_to_the_same_sample(folder, tmp_path):
    undisturbed, _ = group_of(folder, lambda text: "ab<|end|>", "Killed", samples=1, counts=str(tmp_path / "none"))
    (tmp_path / "kills").mkdir()
    rollouts, sampler = group_of(folder, lambda text: "ab<|end|>", "Killed", samples=1, counts=str(tmp_path / "kills"))
    assert rollouts == undisturbed and len(sampler.requests) == 2 + 2  # the first turn was asked three times
    (tmp_path / "always").mkdir()
    rollouts, _ = group_of(folder, lambda text: "ab<|end|>", "Killed", counts=str(tmp_path / "always"), times=99)
    assert all("ended by SIGKILL" in rollout.metadata["generate_error"] for rollout in rollouts)


def test_an_environment_that_cannot_be_made_ends_the_stage_and_is_no_failure_of_samples(folder):
    with pytest.raises(ConfigError, match=r"max_turns of tests.rl.worlds:Echo is 0; it must be above 0"):
        group_of(folder, lambda text: "a<|end|>", "Echo", max_turns=0)
    with pytest.raises(ConfigError, match="RuntimeError: no luck"):
        group_of(folder, lambda text: "a<|end|>", "Unmade", how="raises")


GOES_WRONG = {
    "raises": "KeyError: 'none'",
    "exits": "SystemExit: 3",
    "dies": "its process ended with code 7",
    "is killed": "its process was ended by SIGKILL",
    "crashes": "SIGSEGV",
    "sleeps": "took longer than 15 s",
    "spins": "took longer than 15 s",
    "says why": "RuntimeError: told",
}


@pytest.mark.parametrize(
    "generate",
    [
        {"name": world("Hostile"), "options": {"step_s": 15.0}},
        {"name": f"agent:{worlds.__name__}:agent", "options": {"seconds": 15.0}},
        {"name": f"{worlds.__name__}:function", "timeout_s": 15.0},
    ],
    ids=["class", "agent", "function"],
)
def test_whatever_plays_a_sample_fails_alone_with_the_reason_and_its_last_words_and_leaves_nothing(folder, generate):
    fine, *wrong, last = rollouts_of(folder, ["fine", *GOES_WRONG, "fine"], generate)
    assert fine.reward is not None and fine.finish_reason != "error"
    assert last == replace(fine, group_id=last.group_id, prompt_id=last.prompt_id)
    for (way, reason), rollout in zip(GOES_WRONG.items(), wrong, strict=True):
        assert rollout.finish_reason == "error" and reason in rollout.metadata["generate_error"], (way, rollout)
    assert wrong[-1].metadata["last_words"] == "2\n3\n4\n5\n6"
    assert_none_is_left(20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_agents_that_go_wrong_end_no_run_and_touch_no_other_sample(folder):
    draw = random.Random(7)
    names = [*worlds.ways(), *worlds.calls(SimpleNamespace(api_key="k"))]
    wrong = [*names, *(draw.choice(names) for _ in range(200 - len(names)))]
    mixed = draw.sample(["fine"] * 50 + wrong, 250)
    generate = {"name": f"agent:{worlds.__name__}:agent", "options": {"seconds": 10.0, "max_bytes": 512 << 20}}
    (alone,) = rollouts_of(folder, ["fine"], generate)
    rollouts = rollouts_of(folder, mixed, generate)
    assert_none_is_left(60)
    unhurt, reasons = Counter(), {}
    for way, rollout in zip(mixed, rollouts, strict=True):
        reasons[way] = rollout.metadata.get("generate_error", "")
        if way == "fine":
            assert rollout == replace(alone, group_id=rollout.group_id, prompt_id=rollout.prompt_id)
        elif rollout.reward is not None:
            unhurt[way] += 1
    assert not unhurt, unhurt
    assert "refused with [401]" in reasons["guesses keys"], reasons["guesses keys"]


def assert_none_is_left(seconds: float) -> None:
    """Fail when a process below a fork server outlives this time."""
    deadline = time.monotonic() + seconds
    while (left := in_forks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def in_forks() -> list[int]:
    """Processes below the fork servers of this one."""
    servers = [one for one in psutil.Process().children() if "fork_server" in " ".join(one.cmdline())]
    assert servers, "there is nothing to look at"
    return [child.pid for server in servers for child in server.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_episodes_that_go_wrong_end_no_run_and_touch_no_other_sample(folder):
    wrong = worlds.drawn(1000, seed=7)
    fine = ["fine"] * 250
    mixed = random.Random(7).sample(fine + wrong, 1250)
    limits = {"step_s": 10.0, "cpu_s": 2, "max_bytes": 256 << 20, "max_turns": 6}
    generate = {"name": world("Hostile"), "options": limits}
    (alone,) = rollouts_of(folder, ["fine"], generate)
    found = rollouts_of(folder, mixed, generate)
    assert_none_is_left(60)
    harmless, reasons = Counter(), Counter()
    for answer, rollout in zip(mixed, found, strict=True):
        way = answer.partition(" in ")[0]
        if answer == "fine":
            assert rollout == replace(alone, group_id=rollout.group_id, prompt_id=rollout.prompt_id)
        elif rollout.finish_reason == "error":
            assert rollout.metadata["generate_error"].startswith(("reset", "step", "end", "ValueError: ")), rollout
            reasons[way] += 1
        else:
            harmless[answer] += 1
    print(f"{sum(reasons.values())} failed: {reasons}\nthe others: {harmless}")
    assert set(reasons) == set(worlds.ways()) and sum(reasons.values()) + sum(harmless.values()) == 1000
    assert set(harmless) <= {"leaves a daemon in step", "never ends in step", "answers nothing in reset"}


def rollouts_of(folder, answers: list[str], generate) -> list[Rollout]:
    """One rollout of each prompt, all at once."""
    stage = stage_in("Hostile", {}, samples_per_prompt=1, max_new_tokens=64, generate=generate)
    sampler, renderer = Policy(folder, lambda text: "a<|end|>"), load_renderer(folder)
    given = {"messages": [{"role": "user", "content": "hi"}], "reward": "auto"}
    ids = tuple(renderer.prompt(given["messages"]))
    records = [{**given, "prompt_id": f"p{number}", "answer": answer} for number, answer in enumerate(answers)]
    prompts = [Prompt(epoch=0, record=record, token_ids=ids) for record in records]

    async def all_of_them(generator):
        return await asyncio.gather(*map(generator.group, prompts))

    turns = Turns(stage, sampler.encoding, renderer, context=CONTEXT, vocabulary=VOCABULARY)
    with RewardPool("reported") as pool:
        generator = RolloutGenerator(stage, sampler, pool, sampler.encoding, renderer.stop_ids, turns)
        batches = asyncio.run(all_of_them(generator))
    return [rollout for batch in batches for rollout in batch.all_rollouts]


# The two that are shipped


def test_the_policy_searches_a_corpus_and_a_right_answer_is_rewarded(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = {"Ada": "Ada lives in Rome.", "Bob": "Bob lives in Oslo.", "Cy": "Cy sails the sea."}
    corpus.write_text("".join(json.dumps({"title": name, "text": text}) + "\n" for name, text in texts.items()))
    search = Search(corpus=str(corpus), top=2, search_reward=0.5)
    assert search.found("where does bob live?") == "Bob: Bob lives in Oslo."
    assert search.found("zebra") == "nothing found"
    rewards = {}
    for query, answer in (("Bob", "oslo."), ("Ada", "Oslo"), ("Bob", "Rome")):
        assert search.reset(seed=0, record={"answer": "Oslo"}) is None
        assert search.step(Action("", (ToolCall("search", {"query": query}),)))[2] is False
        rewards[query, answer] = search.step(Action(answer))[1:3]
    assert rewards == {("Bob", "oslo."): (1.5, True), ("Ada", "Oslo"): (1.0, True), ("Bob", "Rome"): (0.5, True)}
    assert search.metrics() == {"searches": 1, "found": 1.0}


def test_the_text_game_is_laid_out_by_its_seed_and_is_won_with_the_key():
    one, other = Rooms(num_rooms=4), Rooms(num_rooms=4)
    seen = [one.reset(seed=seed, record={}) for seed in range(20)]
    assert seen == [other.reset(seed=seed, record={}) for seed in range(20)] and len({str(each) for each in seen}) > 10
    for seed in range(20):
        commands = won(Rooms(num_rooms=4, max_commands=99), seed)
        assert "take key" in commands and commands[-1] == "open chest"
    game = Rooms(max_commands=2)
    game.reset(seed=1, record={})
    said, reward, done, _ = game.step(Action("dance"))
    assert said.startswith("That is not possible.") and (reward, done) == (0.0, False)
    assert game.step(Action("dance"))[2] is True and game.metrics() == {"commands": 2, "wrong_commands": 2}


def test_a_stage_names_the_shipped_environments_by_their_path_and_trusts_them(folder, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "Bob lives in Oslo."}')
    says = lambda text: "Oslo<|end|>" if "in Oslo" in text else "<|tool_call|>Bob<|tool_call_end|>"  # noqa: E731
    names = [f"nanodag.rl.environments.examples.{name}" for name in ("search:Search", "rooms:Rooms")]
    corpus = str(tmp_path / "corpus.jsonl")
    (rollout, _), _ = group_of(folder, says, names[0], answer="Oslo", corpus=corpus)
    assert rollout.reward == 1.0 and rollout.metadata["metrics"] == {"searches": 1.0, "found": 1.0}
    (rollout, _), _ = group_of(folder, lambda text: "sing<|end|>", names[1], context=2000, max_commands=3)
    assert rollout.reward == 0.0 and rollout.metadata["metrics"]["wrong_commands"] == 3
    own = [registry.own_function("generate", world(name)) for name in (*names, "Echo")]
    assert own == ["", "", f"{worlds.__name__}:Echo"]


def won(game: Rooms, seed: int) -> list[str]:
    """The commands of one who looks everywhere, whose rewards add up to 1."""
    said, done, total, commands = game.reset(seed=seed, record={})[-1]["content"], False, 0.0, []
    draw = random.Random(0)
    while not done:
        ways = re.search(r"You can go ([^.]*)\.", said).group(1).split(", ")
        command = "take key" if "key" in said else f"go {draw.choice(ways)}"
        if "chest" in said and "take key" in commands:
            command = "open chest"
        commands.append(command)
        said, reward, done, _ = game.step(Action(f" {command.title()}\n"))
        total += reward
    assert total == 1.0 and game.metrics()["wrong_commands"] == 0
    return commands
