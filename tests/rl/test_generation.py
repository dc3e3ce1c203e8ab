"""Which groups are trained, in which order, and what becomes of every prompt."""

import asyncio
from concurrent.futures import Future

import pytest

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.errors import ConfigError, SamplerError, StageFailed
from nanodag.inference.seeds import derived_seed as group_seed
from nanodag.rewards.reward import Reward
from nanodag.rl.rollouts.batch import read_batch, write_batch
from nanodag.rl.rollouts.prompts import PolicyFormat, first_prompts
from tests.rl import fakes
from tests.rl.fakes import EQUAL, SPREAD, STOP, FakePool, FakeSampler, answers, cursor_over, generator, ids, kept, step


def one_step(tmp_path, of, *, delays=None, number=1, cursor=None, **values):
    """A step over prompts that are answered so, and its cursor."""
    cursor = cursor or cursor_over(tmp_path, [1] * len(of))
    return step(answers(of, delays), cursor, number, **{"prompts_per_step": len(of), **values}), cursor


FOUR, LATE = {0: EQUAL, 1: SPREAD, 2: SPREAD, 3: SPREAD}, dict.fromkeys(range(6), EQUAL) | {4: SPREAD, 5: SPREAD}


@pytest.mark.parametrize(
    ("of", "values", "trained", "equal", "rest"),
    [
        ({0: EQUAL, 1: SPREAD, 2: SPREAD}, {}, ["p1"], ["p0"], ["p2"]),  # one wave
        *[(FOUR, {"over_sampling": 4, "delays": delays}, ["p1", "p2"], ["p0"], ["p3"])  # made for nothing: again
          for delays in ({}, {0: 50}, {1: 50, 3: 20}, {2: 50})],
        (LATE, {"over_sampling": 2}, ["p4", "p5"], ["p0", "p1", "p2", "p3"], ["p0"]),  # waves until enough pass
    ],
)  # fmt: skip
def test_groups_with_spread_are_trained_in_prompt_order_whoever_ends_first(tmp_path, of, values, trained, equal, rest):
    batch, cursor = one_step(tmp_path, of, prompts_per_step=2, **values)
    assert kept(batch) == trained and fakes.dropped(batch) == [(name, "zero_spread") for name in equal]
    assert ids(cursor.take(1)) == rest


def test_a_group_that_is_not_needed_is_aborted_and_the_pool_keeps_the_futures_of_its_rewards(tmp_path):
    late: list[Future[Reward | str]] = []

    class LatePool(FakePool):
        def submit_group(self, prompt, completions, **reported):
            if prompt["prompt_id"] != "p3":
                return super().submit_group(prompt, completions)
            late.extend(Future() for _ in completions)
            return late[-len(completions) :]

    for delays, aborted in (({3: 10_000}, ["step-1-p3@0"]), ({0: 50, 1: 50}, [])):
        sampler = answers(dict.fromkeys(range(4), SPREAD), delays)
        step(sampler, cursor_over(tmp_path, [1] * 4), pool=LatePool(), over_sampling=4)
        assert sampler.aborted == aborted
    assert len(late) == 2 and not any(future.cancelled() for future in late)


def test_a_rollout_says_what_was_sampled_by_whom_and_why_it_ended(tmp_path):
    batch = step(answers({0: SPREAD, 1: SPREAD}), cursor_over(tmp_path, [3, 1]))
    first, second = batch.kept[0][1]
    assert first.group_id == "p0@0" and (first.sample_index, second.sample_index) == (0, 1)
    assert first.prompt_token_ids == (1, 1, 1) and first.sampled_token_ids == (ord("0"), STOP)
    span = first.spans[1]
    assert span.mask == (1, 1) and span.versions == (3, 3)  # the stop token is trained too
    assert span.logprobs == pytest.approx((-0.1, -0.2)) and first.finish_reason == "stop"
    assert (first.reward, second.reward) == (0.0, 1.0)


def test_a_sample_whose_reward_failed_is_left_out_and_a_group_of_one_is_dropped(tmp_path):
    batch, _ = one_step(tmp_path, {0: "?01", 1: "?0?"}, samples_per_prompt=3, max_failed_rewards=0.5)
    ((_, group),) = batch.kept
    assert [rollout.sample_index for rollout in group] == [1, 2]
    assert [rollout.sample_index for rollout in batch.failed] == [0] and len(batch.all_rollouts) == 6
    assert fakes.dropped(batch) == [("p1", "reward_failed")]
    assert batch.dropped[0].rollouts[0].metadata == {"reward_error": "no number"}


def test_groups_of_one_are_trained_where_nothing_is_compared(tmp_path):
    values = {"samples_per_prompt": 1, "advantage": "reinforce_pp", "filters": [], "max_failed_rewards": 0.5}
    batch, _ = one_step(tmp_path, {0: "1", 1: "?"}, **values)
    assert [len(group) for _, group in batch.kept] == [1] and fakes.dropped(batch) == [("p1", "reward_failed")]


def failing(num_failed: int, num_prompts: int = 8) -> dict[int, str]:
    """Of so many prompts with two samples each, the first with one that fails."""
    return {n: "?1" if n < num_failed else SPREAD for n in range(num_prompts)}


@pytest.mark.parametrize(
    ("of", "limit", "why"),
    [
        (failing(5), 0.25, r"failed for 5 of 16 samples of step 3 \(31.2%\). .* no number.* 0.25.*reward_timeout_s"),
        ({0: "??", 1: "??"}, 1.0, "4 of 4 samples .* no number"),
    ],
)
def test_too_many_failed_rewards_end_the_stage_and_all_of_a_step_whatever_the_limit(tmp_path, of, limit, why):
    with pytest.raises(StageFailed, match=f"(?s){why}"):
        one_step(tmp_path, of, number=3, max_failed_rewards=limit)


def test_failed_rewards_below_the_limit_are_said_once_a_step_and_one_of_a_hundred_is_not(tmp_path, caplog):
    one_step(tmp_path, failing(1, 50))
    assert caplog.records == []
    one_step(tmp_path, failing(3))
    (said,) = caplog.records
    assert said.levelname == "WARNING" and "failed for 3 of 16 samples of step 1 (18.8%)" in said.getMessage()


def test_failed_rewards_of_an_evaluation_end_the_stage_too(tmp_path):
    with pytest.raises(StageFailed, match=r"1 of 2 samples of an evaluation \(50.0%\)"):
        asyncio.run(generator(answers({0: "?", 1: "1"})).answers(cursor_over(tmp_path, [1] * 2).take(2)))


HALF = {"prompts_per_step": 4, "max_failed_rewards": 0.5}


def judged_again(batches, cursor, folder, score=fakes.mended, **values):
    """As a checkpoint of step 0 has them, by a stage that was started again."""
    read = []
    for number, batch in enumerate(batches):
        write_batch(folder / f"batch-{number}.json", batch)
        read.append(read_batch(folder / f"batch-{number}.json"))
    return asyncio.run(generator(answers({}), FakePool(score), **values).judged_again(cursor, 0, read))


def test_rewards_that_failed_are_computed_again_when_a_checkpoint_is_read(tmp_path):
    before, cursor = one_step(tmp_path, {0: "??", 1: SPREAD, 2: EQUAL, 3: "?1"}, **HALF)
    assert kept(before) == ["p1"] and len(before.dropped) == 3
    (after,) = judged_again([before], cursor, tmp_path, **HALF)
    assert [(p.prompt_id, [r.reward for r in group]) for p, group in after.kept] == [("p1", [0, 1]), ("p3", [0.5, 1])]
    assert fakes.dropped(after) == [("p0", "zero_spread"), ("p2", "zero_spread")]
    assert not any("reward_error" in rollout.metadata for rollout in after.all_rollouts)


def test_rewards_that_fail_again_leave_a_batch_as_it_was(tmp_path):
    before, cursor = one_step(tmp_path, {0: "?01", 1: "???", 2: "011", 3: "1?1"}, **HALF, samples_per_prompt=3)
    (after,) = judged_again([before], cursor, tmp_path, float, **HALF, samples_per_prompt=3)
    assert after == before and len(before.failed) == 1 and len(before.dropped) == 2


def test_groups_beyond_those_that_steps_train_go_back_to_the_cursor_in_order_when_others_are_mended(tmp_path):
    values = {**HALF, "prompts_per_step": 2, "over_sampling": 4}
    of = dict.fromkeys(range(8), SPREAD) | {0: "?1", 3: "?1"}
    first, cursor = one_step(tmp_path, of, **values)
    second, _ = one_step(tmp_path, of, number=2, cursor=cursor, **values)
    assert [kept(batch) for batch in (first, second)] == [["p1", "p2"], ["p4", "p5"]]
    after = judged_again([first, second], cursor, tmp_path, **values)
    assert [(kept(batch), batch.dropped) for batch in after] == [(["p0", "p1"], []), (["p3", "p4"], [])]
    assert ids(cursor.take(4)) == ["p2", "p5", "p6", "p7"]


def test_a_function_mended_in_part_still_ends_the_stage_above_the_limit(tmp_path):
    before, cursor = one_step(tmp_path, failing(4))
    with pytest.raises(StageFailed, match=r"max_failed_rewards 0\.1"):
        judged_again([before], cursor, tmp_path, float, prompts_per_step=8, max_failed_rewards=0.1)


def test_a_groups_seed_depends_on_stage_step_and_prompt_alone(tmp_path):
    sampler = answers({0: SPREAD, 1: SPREAD})
    step(sampler, cursor_over(tmp_path, [1] * 2), number=4)
    assert [r.params.sampling_seed for r in sampler.requests] == [group_seed(5, 4, "p0@0"), group_seed(5, 4, "p1@0")]
    assert len({group_seed(5, 4, "a"), group_seed(5, 5, "a"), group_seed(6, 4, "a"), group_seed(5, 4, "b")}) == 4
    assert all(0 <= group_seed(seed, 1, "a") < 2**63 for seed in range(20))


def test_prompts_given_back_come_first_and_survive_a_save(tmp_path):
    cursor = cursor_over(tmp_path, [1] * 5)
    taken = cursor.take(4)
    cursor.give_back(taken[2:])
    saved = cursor.state_dict()
    assert ids(cursor.take(3)) == ["p2", "p3", "p4"]
    cursor.load_state_dict(saved)
    cursor.give_back(cursor.take(1))  # p2 again, while p3 waits
    again = cursor_over(tmp_path, [1] * 5)
    again.load_state_dict(cursor.state_dict())
    assert ids(again.take(3)) == ["p2", "p3", "p4"]


def test_overlong_prompts_are_dropped_and_handed_to_the_ledger_once_and_only_such_ones_are_an_error(tmp_path):
    cursor = cursor_over(tmp_path, [1, 11, 1], longest=10)
    assert ids(cursor.take(2)) == ["p0", "p2"]
    assert [(p.prompt_id, reason) for p, reason in cursor.passed_over()] == [("p1", "prompt_too_long")]
    assert cursor.passed_over() == []
    with pytest.raises(ConfigError, match="have more than 10 tokens"):
        cursor_over(tmp_path, [11], longest=10).take(1)


def test_a_share_of_the_prompts_without_spread_is_passed_over_in_the_next_pass_and_comes_again_later(tmp_path):
    cursor = cursor_over(tmp_path, [1] * 40, skip_share=0.5, seed=3)
    batch, _ = one_step(tmp_path, {n: SPREAD if n < 10 else EQUAL for n in range(40)}, cursor=cursor)
    assert len(batch.kept) == 10 and batch.passed_over == []
    assert ids(cursor.take(10)) == [f"p{n}" for n in range(10)]  # those with spread are never passed over
    saved = cursor.state_dict()
    rest = cursor.take(30 - 15)
    skipped = ids(prompt for prompt, reason in cursor.passed_over() if reason == "no_spread_before")
    assert 5 <= len(skipped) <= 25
    again = cursor_over(tmp_path, [1] * 40, skip_share=0.5, seed=3)
    again.load_state_dict(saved)
    assert ids(again.take(15)) == ids(rest)
    assert {prompt.prompt_id for prompt in cursor.take(120) if prompt.epoch > 1} & set(skipped)


@pytest.mark.parametrize(("group", "share"), [("?1", 0.95), (EQUAL, 0.0)])
def test_no_prompt_is_passed_over_for_a_reward_that_failed_or_without_a_curriculum(tmp_path, group, share):
    cursor = cursor_over(tmp_path, [1] * 20, skip_share=share)
    one_step(tmp_path, {n: group if n % 2 else SPREAD for n in range(20)}, cursor=cursor)
    assert ids(cursor.take(20)) == [f"p{n}" for n in range(20)] and cursor.passed_over() == []


def test_a_prompt_that_finds_spread_again_is_tried_in_every_pass(tmp_path):
    cursor = cursor_over(tmp_path, [1], skip_share=0.95)
    cursor.note("p0", has_spread=False)
    cursor.note("p0", has_spread=True)
    assert [prompt.epoch for prompt in cursor.take(5)] == [0, 1, 2, 3, 4]


def test_what_a_sampler_ends_early_is_an_error_of_the_sampler(tmp_path):
    sampler = FakeSampler(lambda request: [fakes.completion([ord("1"), ord("2")], "abort")] * request.params.n)
    with pytest.raises(SamplerError, match="ended request"):
        step(sampler, cursor_over(tmp_path, [1]), prompts_per_step=1)


@pytest.mark.parametrize(("count", "temperature"), [(1, 0.0), (2, 0.8), (1, 0.5)])
def test_an_evaluation_asks_for_as_many_whole_answers_as_the_config_says(tmp_path, count, temperature):
    sampler = answers({0: SPREAD, 1: SPREAD})
    values = {"temperature": 1.5, "max_new_tokens": 99, "partial_rollout_tokens": 3, "over_sampling": 4}
    made = generator(sampler, eval_samples=count, eval_temperature=temperature, **values)
    found = [asyncio.run(made.answers(cursor_over(tmp_path, [1] * 2).take(2))) for _ in range(2)]
    params = [request.params for request in sampler.requests]
    assert {(one.n, one.temperature, one.max_new_tokens) for one in params} == {(count, temperature, 99)}  # no parts
    wanted = [(f"p{number}", index) for number in range(2) for index in range(count)]
    assert [(rollout.prompt_id, rollout.sample_index) for rollout in found[0]] == wanted
    seeds = [one.sampling_seed for one in params]
    assert seeds[:2] == seeds[2:]  # each evaluation draws with the same ones
    assert seeds[0] != seeds[1] if temperature else seeds == [None] * 4


def test_held_out_prompts_that_are_too_long_are_said(tmp_path, caplog):
    cursor_over(tmp_path, [1, 4, 2, 3])
    source = SourceConfig(url=f"file:{tmp_path}/prompts.jsonl")
    mixture = Mixture([source], kind="prompt", seed=0, part="all", once=True, shuffle=False)
    prompts, num_too_long = first_prompts(mixture, PolicyFormat(fakes.FakeRenderer(), {}, ()), count=10, longest=2)
    assert (ids(prompts), num_too_long) == (["p0", "p2"], 2)
    (said,) = caplog.records
    assert said.getMessage().startswith("Not evaluated: 2 held-out prompts of more than 2 tokens, what sampler.context")
