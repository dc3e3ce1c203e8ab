"""Rewards of single steps: where they stand, what advantages they give, worked out by hand, and a stage."""

import json
from dataclasses import replace

import pytest
import torch

from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ConfigError
from nanodag.own_code.find import FOLDER_VARIABLE
from nanodag.rewards.function_rewards import token_places
from nanodag.rewards.reward import Reward
from nanodag.rl.advantages import grpo, process_grpo, step_rewards
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.rollouts.filters import nonzero_spread
from nanodag.rl.rollouts.rollout import Rollout, Span, from_json, prompt_span, to_json
from nanodag.run.build_stage import own_entries
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.encoding import Encoding
from tests.rewards.pools import Pool
from tests.rl.rollouts import rollout, sampled_span
from tests.rl.stages import make_job, metrics, run

FUNCTIONS = '''
def lines(prompt, completion):
    """A step a line; `bad` says one that ends behind the end, `nan` one of no worth."""
    if completion == "bad":
        return 1.0, [(4, 1.0)]
    if completion == "nan":
        return 1.0, [(1, float("nan"))]
    ends = [place + 1 for place, c in enumerate(completion) if c == "\\n"]
    return len(ends), [(end, 0.5 * end) for end in ends]

def letters(prompt, completion):
    """Two steps: the first half's share of letters, and that of the whole."""
    ends = sorted({end for end in (len(completion) // 2, len(completion)) if end})
    steps = [(end, sum(c.isascii() and c.isalpha() for c in completion[:end]) / end) for end in ends]
    return (steps[-1][1] if steps else 0.0), steps
'''


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "my_steps.py").write_text(FUNCTIONS)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))  # as a worker sets it
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_says_a_total_and_the_ends_of_steps_and_fails_alone(functions):
    with Pool("process:my_steps:lines") as pool:
        good, none, bad, nan = pool.score([({}, "a\nbc\nd"), ({}, ""), ({}, "bad"), ({}, "nan")])
    assert (good.value, good.steps) == (2.0, [[2, 1.0], [5, 2.5]])
    assert (none.value, none.steps) == (0.0, [])
    assert "a step that ends at character 4 of a completion of 3" in bad
    assert "the reward's step that ends at 1 is nan" in nan


def test_a_prompt_cannot_ask_for_steps_that_the_stage_does_not_train(functions):
    with Pool("auto") as pool, pytest.raises(ConfigError, match="name it as the stage's `reward`"):
        pool.submit({"reward": "process:my_steps:lines"}, "x")


WORDS = {1: b"ab", 2: b"c\nd", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"!", 0: b""}


def decode(ids) -> str:
    return b"".join(WORDS[number] for number in ids).decode("utf-8", "replace")


def test_a_step_ends_with_the_token_that_completes_its_last_character():
    ids, text = [1, 2, 3, 4, 5, 0], "abc\ndé!"  # the last one is the stop token
    assert text == decode(ids)
    ends = {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 3, 7: 5}
    found = token_places([(end, float(end)) for end in ends], ids, text=text, decode=decode)
    assert found == [(place, float(end)) for end, place in ends.items()]


def test_places_in_the_tokens_of_a_real_tokenizer(tmp_path):
    pairs = {b"th": 256, b"the": 257, b"\xe2\x82": 258}
    save_tokenizer({bytes([value]): value for value in range(256)} | pairs, tmp_path)
    encoding = Encoding(tmp_path)
    text = "the € then\nthe ü"
    ids = encoding.encode(text)
    for end in range(1, len(text)):
        ((place, _),) = token_places([(end, 1.0)], ids, text=text, decode=encoding.decode)
        written = [len(encoding.decode_bytes(ids[:count])) for count in (place, place + 1)]
        assert written[0] < len(text[:end].encode()) <= written[1]


def test_steps_of_the_words_after_a_tool_are_placed_behind_it_and_an_answer_of_a_functions_own_has_none(tmp_path):
    class Letters:
        def decode(self, ids) -> str:
            return "".join(map(chr, ids))

    config = RLStage.of(kind="rl", data=["file:x"], seed=1, reward="process:my_steps:lines")
    generator = RolloutGenerator(config, None, None, Letters(), (0,))
    one = rollout("a", 0, [1], [], reward=0.0)
    words = [sampled_span(list(b"call"), [-1.0] * 4, 0), Span(kind="tool", token_ids=(7, 7))]
    one = replace(one, spans=(prompt_span([1]), *words, sampled_span([*b"xy\nz", 0], [-1.0] * 5, 0)))
    score = Reward(2.0, steps=[[3, 0.5], [4, 1.0]])
    assert generator._with_score(one, "xy\nz", score).steps == ((8, 0.5), (10, 1.0))
    said = generator._with_score(replace(one, metadata={"answer": "xy\nz"}), "xy\nz", score)
    assert said.reward is None and "no place in the tokens" in said.metadata["reward_error"]


def test_steps_are_part_of_a_rollouts_line():
    one = replace(rollout("a", 0, [1], [5, 6], reward=1.0), steps=((0, 0.25), (1, -1.0)))
    assert '"steps":[[0,0.25],[1,-1.0]]' in to_json(one) and from_json(to_json(one)) == one
    with pytest.raises(ValueError, match="a step ends at token 2 of a response of 2"):
        replace(one, steps=((2, 1.0),))


def test_a_group_has_spread_when_its_steps_have():
    def of(reward, *scores):
        return replace(rollout("a", 0, [1], [5, 6], reward=reward), steps=tuple((0, score) for score in scores))

    assert nonzero_spread([of(1.0, 0.0, 1.0), of(1.0, 1.0, 0.0)]) is None
    assert nonzero_spread([of(1.0, 0.5), of(0.0, 0.5)]) == "zero_spread"
    assert nonzero_spread([of(1.0), of(0.0)]) == "zero_spread"


def test_process_grpo_worked_out_by_hand():
    # group 0: scores 1, 3 and 5, mean 3, std 2: -1, 0, 1; group 1: 4 and 4; in group 2 one step alone
    steps = [[(1, 1.0), (3, 3.0)], [(0, 4.0)], [(2, 5.0)], [(2, 4.0)], [], [(0, 9.0)]]
    found = process_grpo(steps, torch.tensor([0, 1, 0, 1, 0, 2]), [5, 2, 4, 3, 2, 1])
    wanted = [[-1, -1, 0, 0, 0], [0, 0], [1, 1, 1, 0], [0, 0, 0], [0, 0], [0]]
    for own, by_hand in zip(found, wanted, strict=True):
        assert own.tolist() == pytest.approx(by_hand, abs=1e-6)
    assert [own.tolist() for own in (found[1], found[3], found[5])] == [[0.0] * 2, [0.0] * 3, [0.0]]


def test_two_steps_of_one_token_add_up_and_one_step_at_the_end_is_grpo():
    (both, other) = process_grpo([[(1, 1.0), (1, 2.0)], [(0, 3.0)]], torch.zeros(2, dtype=torch.int64), [2, 2])
    assert both.tolist() == pytest.approx([-1.0, -1.0], abs=1e-5)
    assert other.tolist() == pytest.approx([1.0, 0.0], abs=1e-5)
    rewards, groups = torch.tensor([0.1, 0.7, 0.4, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    found = process_grpo([[(2, float(reward))] for reward in rewards], groups, [3] * 5)
    whole = grpo(rewards, groups, torch.full((5,), 3))
    for own, advantage in zip(found, whole.tolist(), strict=True):
        assert own.tolist() == pytest.approx([advantage] * 3)


def test_a_step_that_ends_at_an_untrained_token_stands_at_the_trained_one_before_it():
    mask = torch.tensor([True, True, False, False, True, False])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    steps = [[(0, 1.0), (2, 2.0), (1, 4.0)], [(0, 8.0), (2, 16.0)]]
    assert step_rewards(steps, mask, ids).tolist() == [1.0, 6.0, 0.0, 0.0, 16.0, 0.0]
    assert step_rewards([[], [(1, 1.0)]], mask, ids).tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(("values", "message"), [
    ({"advantage": "rloo"}, "advantage rloo is of whole responses"),
    ({"advantage": "my_module:mine"}, "advantage my_module:mine is of whole responses"),
    ({"reward": {"process:my_steps:lines": 1.0, "exact": 0.5}}, "cannot be added to other rewards"),
    ({"overlong_buffer": 5}, "set it to 0, and let the function score the length"),
    ({"kl_in": "reward", "kl_coefficient": 0.1, "kl_kind": "k1"}, "use kl_in: loss, or advantage gae"),
    ({"reward": "process:exact"}, "needs a function as process:"),
])  # fmt: skip
def test_what_has_no_meaning_for_steps_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RLStage.of(kind="rl", data=["file:x"], **{"reward": "process:my_steps:lines", **values})


def test_a_stages_key_knows_the_function_that_scores_steps(functions):
    stage = RLStage.of(kind="rl", data=["file:x"], reward="process:my_steps:lines")
    known = own_entries(stage)
    assert list(known) == ["process:my_steps:lines"] and known["process:my_steps:lines"]["sha256"]


def credited(job, step: int) -> list[tuple[Rollout, list[float]]]:
    """Each trained rollout of a step, and the advantages of its tokens."""
    folder = job.records / "rollouts"
    name = f"step-{step:08d}"
    rollouts = [from_json(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    scores = [json.loads(line) for line in (folder / f"{name}.scores-0.jsonl").read_text().splitlines()]
    advantages = {(one["group_id"], one["sample_index"]): one["advantages"] for one in scores}
    return [(one, advantages[one.group_id, one.sample_index]) for one in rollouts]


@pytest.mark.parametrize("advantage", ["grpo", pytest.param("gae", marks=pytest.mark.slow)])
def test_a_stage_learns_from_steps_alone(tmp_path, advantage):
    values = {"filters": []} if advantage == "gae" else {}
    job = make_job(tmp_path, reward="process:my_steps:letters", advantage=advantage, num_steps=4, **values)
    (tmp_path / "my_steps.py").write_text(FUNCTIONS)
    run(job)
    evals = metrics(job, "eval")
    assert evals[-1]["eval_reward"] > evals[0]["eval_reward"]
    found = credited(job, 1)
    assert found and all(one.steps for one, _ in found)
    if advantage == "grpo":
        group = [one for one, _ in found if one.group_id == found[0][0].group_id]
        scores = torch.tensor([score for one in group for _, score in one.steps], dtype=torch.float64)
        one, advantages = found[0]
        for token, value in enumerate(advantages):
            to_come = sum(score - scores.mean() for place, score in one.steps if place >= token) / scores.std()
            assert value == pytest.approx(float(to_come), abs=1e-4)
