"""The pool of reward processes: what fails, fails its sample only."""

import psutil
import pytest

from nanodag.errors import ConfigError, MissingTool
from nanodag.own_code.find import FOLDER_VARIABLE
from nanodag.rewards import sandbox
from tests.fault.processes import wait_until
from tests.rewards.pools import Pool

REWARDS = """
import os, sys, time

def kind(prompt, completion):
    if completion == "raise":
        raise RuntimeError("a reason")
    if completion == "hang":
        while True:
            time.sleep(1)
    if completion == "exit":
        os._exit(3)
    if completion == "quit":
        sys.exit("no reward")
    if completion == "print":
        print("noise" * 1000)
    if completion == "memory":
        bytearray(1 << 40)
    if completion == "nan":
        return float("nan")
    return len(completion) / 10

def longest(prompt, completions, *, best=1.0):
    if "short" in completions:
        return [1.0]
    return [best * (one == max(completions, key=len)) for one in completions]

def constant(prompt, completion, *, value):
    return value
"""


@pytest.fixture
def own_reward(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))  # as a worker sets it
    return "my_rewards:kind"


def test_a_sample_that_raises_hangs_or_kills_fails_alone_with_its_reason(own_reward, tmp_path):
    with Pool(own_reward, num_processes=2, timeout_s=1.0) as pool:
        kinds = ["abc", "raise", "hang", "exit", "quit", "memory", "nan", "print", "abcd"]
        scores = dict(zip(kinds, pool.score([({}, kind) for kind in kinds]), strict=True))
    assert scores["abc"].value == 0.3 and scores["abcd"].value == 0.4 and scores["print"].value == 0.5
    assert {kind for kind, score in scores.items() if isinstance(score, str)} == {*kinds} - {"abc", "print", "abcd"}
    own = tmp_path / "my_rewards.py"
    assert scores["raise"] == f"RuntimeError: a reason ({own}, line 6, in kind)"
    assert "took longer than 1 s" in scores["hang"]
    assert "ended with code 3" in scores["exit"]
    assert "SystemExit: no reward" in scores["quit"]
    assert "MemoryError" in scores["memory"]
    assert "finite" in scores["nan"] and f"{own}, line 4" in scores["nan"]  # where the function begins


def test_a_group_reward_sees_the_answers_to_one_prompt_and_no_others(own_reward):
    with Pool({"group:my_rewards:longest": 1.0, own_reward: 1.0}, num_processes=2) as pool:
        first = pool.submit_group({}, ["a", "abc", "ab"])
        second = pool.submit_group({}, ["abcdef", "x"])
        scores = [[future.result() for future in group] for group in (first, second)]
    assert [[score.components["longest"] for score in group] for group in scores] == [[0, 1, 0], [1, 0]]
    assert scores[0][1].value == pytest.approx(1.3) and scores[0][1].components["my_rewards"] == pytest.approx(0.3)


def test_a_group_reward_of_the_wrong_length_fails_its_group_with_the_reason(own_reward):
    with Pool("group:my_rewards:longest") as pool:
        failed = [future.result() for future in pool.submit_group({}, ["short", "a"])]
        right = [future.result() for future in pool.submit_group({}, ["a", "bc"])]
    (reason,) = set(failed)
    assert reason.startswith("ValueError: my_rewards:longest returned 1 rewards for 2 answers (")
    assert reason.endswith("my_rewards.py, line 22, in longest)")
    assert [score.value for score in right] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "said"),
    [("exakt", "no reward 'exakt'; choose one of code"), ("group:exact", "function as group:"),
     ("process:exact", "function as process:")],
)  # fmt: skip
def test_what_is_no_reward_is_refused(reward, said):
    with pytest.raises(ConfigError, match=said):
        Pool(reward)


def test_a_reward_that_cannot_be_imported_stops_the_run_not_one_sample():
    with Pool("no_such_module:reward") as pool, pytest.raises(ConfigError, match="cannot be imported"):
        pool.score([({}, "x")])


def test_where_there_is_no_sandbox_the_reward_code_stops_the_run_not_one_sample(monkeypatch):
    def none():
        raise MissingTool("there is none")

    monkeypatch.setattr(sandbox, "walls", none)
    prompt = {"reward": "code", "answer": "", "metadata": {"tests": ["assert f() == 1"]}}
    with Pool("auto") as pool, pytest.raises(MissingTool, match="there is none"):
        pool.submit(prompt, "def f(): return 1")


def test_processes_end_when_the_pool_is_closed(own_reward):
    before = _children()  # of other tests in this process
    pool = Pool(own_reward)
    pool.score([({}, "abc")])
    pool.close()
    wait_until(lambda: _children() <= before)


def test_what_waits_when_the_pool_is_closed_is_cancelled_and_what_hangs_is_given_up(own_reward):
    pool = Pool(own_reward, timeout_s=600.0)
    pool.score([({}, "abc")])
    first, *rest = [pool.submit({}, "hang") for _ in range(50)]
    given_up = pool.submit({}, "abc")
    assert given_up.cancel()
    wait_until(first.running)
    pool.close()
    assert "was ended by SIGKILL" in first.result(timeout=0)
    assert all(future.cancelled() for future in rest)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_functions_of_ones_own_get_their_options_alone_and_after_a_prefix(own_reward):
    group, constant = "group:my_rewards:longest", "my_rewards:constant"
    options = {group: {"best": 4}, constant: {"value": 0.5}}
    with Pool({group: 1.0, constant: 1.0}, options=options) as pool:
        assert [future.result().value for future in pool.submit_group({}, ["a", "abc"])] == [0.5, 4.5]
    with Pool(constant, options={constant: {"worth": 1}}) as pool:
        with pytest.raises(ConfigError, match="no option 'worth'; it takes value"):
            pool.score([({}, "a")])
