"""Environments: what they answer, the processes that they run in, and the loop of a sample."""

import asyncio
import json
import random
import re

import psutil
import pytest

from nanodag import registry
from nanodag.children.forks import ForkLimits, ForkServer
from nanodag.errors import ConfigError, StageFailed
from nanodag.rl.control.generation import check_failures
from nanodag.rl.environments.environment import MAKE, Action, Earned, ToolCall, heard, metrics_of, roles_of, tools_of
from nanodag.rl.environments.examples.rooms import Rooms
from nanodag.rl.environments.examples.search import Search
from nanodag.rl.rollouts.metrics import rollout_metrics
from nanodag.tokenizer.encoding import Encoding
from tests.rl import worlds
from tests.rl.templates import QWEN25, renderer_of
from tests.rl.turns import rollouts_of, speaking

EXAMPLES = [f"nanodag.rl.environments.examples.{name}" for name in ("search:Search", "rooms:Rooms")]


def server_of(path: str, **options) -> ForkServer:
    limits = ForkLimits(cpu_s=20, max_bytes=worlds.MAX_BYTES, max_processes=8)
    return ForkServer(MAKE, {"path": f"{worlds.__name__}:{path}", "options": options}, limits, name="it")


def played(server: ForkServer, steps: int = 3) -> list[dict]:
    """What an episode answers."""

    async def episode() -> list[dict]:
        fork = server.fork()
        try:
            reset = {"seed": 1, "record": {"prompt_id": "p", "messages": [], "answer": ""}}
            step = {"text": "a", "calls": [], "is_cut": False, "role": ""}
            return [await fork.ask(one, 20.0) for one in ({"reset": reset}, *[{"step": step}] * steps)]
        finally:
            fork.close()

    return asyncio.run(episode())


def test_a_process_that_the_environment_starts_when_it_is_made_lives_as_long_as_it():
    server = server_of("Unmade", how="forks")
    played(server, steps=2)
    helper = min(psutil.Process(server._child.pid).children(), key=lambda one: one.create_time())
    assert helper.is_running()  # an episode may be there, too, which is not yet reaped
    server.close()
    assert not helper.is_running()


def test_each_episode_begins_with_the_same_random_numbers_also_in_a_process_that_was_started_again():
    server = server_of("Echo", rounds=5)
    first = played(server)
    assert "rounds" not in " ".join(psutil.Process(server._child.pid).cmdline()), "anybody may read it"
    killed = psutil.Process(server._child.pid)
    killed.kill()
    psutil.wait_procs([killed], timeout=20)
    assert played(server) == first and server._child.pid != killed.pid
    server.close()
    assert first[1]["info"]["components"]["noise"] != first[2]["info"]["components"]["noise"]


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
    server = server_of(path, **options)
    for _ in range(2):  # the second time it is not tried again
        with pytest.raises(ConfigError, match=reason):
            server.fork()
    assert server._child is None


def hear(found, *call_ids, may_be_none=False):
    return heard(found, roles=["a", "b"], speaker="a", call_ids=call_ids, may_be_none=may_be_none)


def test_an_observation_is_a_text_texts_or_messages_for_one_role():
    assert hear("hi").messages == [{"role": "user", "content": "hi"}]
    assert hear("4", "c0").messages == [{"role": "tool", "tool_call_id": "c0", "content": "4"}]
    assert [one["tool_call_id"] for one in hear(["4", "5"], "c0", "c1").messages] == ["c0", "c1"]
    mixed = [{"role": "tool", "content": "4"}, {"role": "user", "content": "go on"}]
    assert [one["role"] for one in hear(mixed, "c0").messages] == ["tool", "user"]
    told = hear({"to": "b", "messages": "judge", "anew": True}, "c0")
    assert (told.role, told.is_anew, told.messages) == ("b", True, [{"role": "user", "content": "judge"}])
    assert hear(None, may_be_none=True).messages is None
    for found, *call_ids, reason in (
        (None, "an observation is a text"),
        ([], "an observation is a text"),
        (["4"], "c0", "c1", "2 calls were answered by 1 texts"),
        ({"messages": "x"}, "an observation has `to`"),
        ([{"role": "user", "content": 3}], "a message has a role"),
        ([{"role": "tool", "content": "x"}], "more messages of the role tool than calls"),
    ):
        with pytest.raises(ValueError, match=reason):
            hear(found, *call_ids)


def test_rewards_add_up_by_role_and_only_finite_numbers_are_taken():
    earned = Earned()
    earned.add(0.5, {"components": {"part": 1.0}}, ["a", "b"])
    earned.add({"a": 0.25, "b": -1}, {"components": {"part": 2.0}}, ["a", "b"])
    assert earned.by_role == {"a": 0.75, "b": -1.0} and earned.components == {"part": 3.0}
    for reward in (float("nan"), "1", True, None, {"c": 1.0}):
        with pytest.raises(ValueError, match=r"the reward|the role 'c'"):
            earned.add(reward, {}, ["a", "b"])
    for take, wrong in ((metrics_of, [1]), (tools_of, [{"type": "x"}]), (roles_of, {"": True})):
        with pytest.raises(ValueError):
            take(wrong)
    assert roles_of(None) == {"": True}


def group_of(folder, says, name: str, *, answer="", most=64, samples=2, context=256, **options):
    """The rollouts of one prompt with their rewards. says: the answers, or what gives them by the text of a prompt.
    name: of a class of `worlds`, or in full."""
    path = name if ":" in name else f"{worlds.__name__}:{name}"
    options = {"step_s": 20.0, "max_bytes": worlds.MAX_BYTES, "max_processes": 8, **options}
    values = {"generate": {"name": f"environment:{path}", "options": options}, "samples_per_prompt": samples}
    values |= {"max_new_tokens": most, "sampler": {"context": context, "max_batch": 16}}
    sampler = speaking(Encoding(folder), says if callable(says) else lambda text: says)
    return rollouts_of(folder, sampler, [{"answer": answer}], **values)


def spelled(encoding, rollout) -> list[tuple[str, str]]:
    return [(span.kind, encoding.decode(span.token_ids)) for span in rollout.spans]


HI = ("prompt", "<|bos|><|user|>hi<|end|><|assistant|>")


def test_the_policy_and_the_environment_speak_in_turns_and_step_rewards_add_up(folder, encoding):
    rollouts = group_of(folder, "ab<|end|>", "Echo")
    for rollout in rollouts:
        said, answer = ("sampled", "ab<|end|>"), ("tool", "<|user|>ab!<|end|><|assistant|>")
        assert spelled(encoding, rollout) == [HI, said, answer, said]
        assert rollout.reward == 0.5 and rollout.reward_components["told"] == 0.5
        assert (rollout.metadata["turns"], rollout.metadata["ended"]) == (2, "done")
    assert rollouts[0].metadata["metrics"] == rollouts[1].metadata["metrics"]  # the same seed: that of the prompt
    metrics = rollout_metrics(rollouts)
    assert metrics["turns"] == 2 and metrics["metric_left"] == 0 and metrics["reward"] == 0.5


def test_an_environment_may_give_the_prompt_and_a_last_turn_that_is_cut_off_is_heard(folder, encoding):
    for rollout in group_of(folder, "abcd<|end|>", "Echo", most=7, rounds=4, greeting="say"):
        first, *_, last = spelled(encoding, rollout)
        assert first == (HI[0], HI[1].replace("hi", "say")) and last == ("sampled", "ab")
        assert rollout.metadata["ended"] == "tokens" and rollout.finish_reason == "length"
        assert rollout.reward == 0.5 and rollout.num_sampled == 7
    rollouts = group_of(folder, "abcd<|end|>", "Echo", turn_tokens=3)
    between = "<|end|><|user|>abc!<|end|><|assistant|>"
    assert [said for _, said in spelled(encoding, rollouts[0])][1:] == ["abc", between, "abc"]
    rollouts = group_of(folder, "ab<|end|>", "Echo", rounds=9, max_turns=3)
    assert {(one.metadata["ended"], one.finish_reason, one.reward) for one in rollouts} == {("turns", "length", 0.75)}


def test_a_call_is_answered_by_the_environment_and_a_wrong_one_before_it_gets_there(tmp_path):
    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    right = call("price", '{"goods": "pears"}')
    turns = [call("cost", "{}") + right, call("price", '"pears"'), right, "5"]

    def says(text: str) -> str:
        return turns[text.count("<|im_start|>assistant") - 1] + "<|im_end|>"

    renderer_of(QWEN25, tmp_path)
    for rollout in group_of(tmp_path, says, "Shop", most=900, context=3000):
        tools = [text for kind, text in spelled(Encoding(tmp_path), rollout) if kind == "tool"]
        assert "error: there is no tool 'cost'; there is price" in tools[0] and "not called, as another" in tools[0]
        assert "error: the arguments must be a JSON object" in tools[1] and "\n5\n" in tools[2]
        assert rollout.reward == 1.0 and rollout.metadata["turns"] == 4 and rollout.branch == 0


@pytest.mark.parametrize("judge_is_trained", [False, True])
def test_each_role_has_its_own_sequences_trained_or_not_and_its_own_rewards(folder, encoding, judge_is_trained):
    def says(text):
        if "<|user|>is " in text:
            return "yes<|end|>" if "is 22 good" in text else "no<|end|>"
        return "22<|end|>" if "once more" in text else "1<|end|>"

    rollouts = group_of(folder, says, "Court", judge_is_trained=judge_is_trained)
    solver, *judges = [one for one in rollouts if one.sample_index == 0]
    assert (solver.role, solver.branch, solver.reward) == ("solver", 0, 1.0)
    assert [span.kind for span in solver.spans] == ["prompt", "sampled", "tool", "sampled"]
    assert solver.num_trained == solver.num_sampled == 5
    assert sorted(spelled(encoding, judge)[1][1] for judge in judges) == ["no<|end|>", "yes<|end|>"]
    for judge in judges:  # it was asked anew each time: a sequence for each question
        assert judge.role == "judge" and judge.branch > 0 and judge.reward == 0.25
        assert judge.num_trained == (judge.num_sampled if judge_is_trained else 0)


def test_too_many_samples_whose_environment_fails_end_the_stage_and_one_that_cannot_be_made_at_once(folder):
    failed = group_of(folder, "a<|end|>", "Hostile", answer="knows no such role")
    with pytest.raises(StageFailed, match=r"2 of 4 samples of step 1 \(50.0%\).*max_failed_rewards 0.4"):
        check_failures([*failed, *group_of(folder, "a<|end|>", "Echo")], of="step 1", max_failed_rewards=0.4)
    for options, reason in (({"how": "raises"}, "RuntimeError: no luck"), ({"max_turns": 0}, "must be above 0")):
        with pytest.raises(ConfigError, match=reason):
            group_of(folder, "a<|end|>", "Unmade", **options)


def test_an_episode_whose_process_somebody_kills_is_played_again_to_the_same_sample(folder, tmp_path):
    asked = []

    def killed(name, **options):
        says = lambda text: asked.append(name) or "ab<|end|>"  # noqa: E731
        return group_of(folder, says, "Killed", counts=str(tmp_path / name), **options)

    (tmp_path / "twice").mkdir()
    assert killed("never", samples=1) == killed("twice", samples=1)
    assert (asked.count("never"), asked.count("twice")) == (2, 2 + 2)  # the first turn was asked three times
    (tmp_path / "always").mkdir()
    failed = killed("always", times=99)
    assert all("ended by SIGKILL" in rollout.metadata["generate_error"] for rollout in failed)


def corpus(folder) -> str:
    texts = {"Ada": "Ada lives in Rome.", "Bob": "Bob lives in Oslo.", "Cy": "Cy sails the sea."}
    lines = [json.dumps({"title": name, "text": text}) + "\n" for name, text in texts.items()]
    (folder / "corpus.jsonl").write_text("".join(lines))
    return str(folder / "corpus.jsonl")


def test_the_policy_searches_a_corpus_and_a_right_answer_is_rewarded(tmp_path):
    search = Search(corpus=corpus(tmp_path), top=2, search_reward=0.5)
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
    says = lambda text: "Oslo<|end|>" if "in Oslo" in text else "<|tool_call|>Bob<|tool_call_end|>"  # noqa: E731
    (rollout, _) = group_of(folder, says, EXAMPLES[0], answer="Oslo", corpus=corpus(tmp_path))
    assert rollout.reward == 1.0 and rollout.metadata["metrics"] == {"searches": 1.0, "found": 1.0}
    (rollout, _) = group_of(folder, "sing<|end|>", EXAMPLES[1], context=2000, max_commands=3)
    assert rollout.reward == 0.0 and rollout.metadata["metrics"]["wrong_commands"] == 3
    mine = f"{worlds.__name__}:Echo"
    own = [registry.own_function("generate", f"environment:{path}") for path in (*EXAMPLES, mine)]
    assert own == ["", "", mine]


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
