"""Which groups are trained, in which order, and what becomes of every prompt. The sampler is a fake that we own."""

import asyncio
import json
from concurrent.futures import Future

import pytest

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.errors import ConfigError, SamplerError, StageFailed
from nanodag.inference.protocol import Completion, FinishReason, VersionSpan
from nanodag.rewards.reward_pool import SampleReward
from nanodag.rl.control.generation import RolloutGenerator
from nanodag.rl.control.step_records import StepLines
from nanodag.rl.rollouts.batch import read_batch, write_batch
from nanodag.rl.rollouts.prompts import PromptCursor, first_prompts, read_ledger
from nanodag.rl.rollouts.segments import group_seed
from tests.rl.fakes import STOP, FakeEncoding, FakePool, FakeRenderer, config, cursor_over, ids


class FakeSampler:
    """Answers prompt number n with `answers[n]`, after `delays[n]` turns of the event loop."""

    def __init__(self, answers: dict[int, str], delays: dict[int, int] | None = None, finish: str = "stop") -> None:
        self.answers, self.delays, self.finish = answers, delays or {}, finish
        self.requests, self.aborted = [], []

    async def generate(self, requests):
        (request,) = requests
        self.requests.append(request)
        number = request.input_ids[0] - 1
        for _ in range(self.delays.get(number, 0)):
            await asyncio.sleep(0)
        return [[self.completion(answer) for answer in self.answers[number][: request.params.n]]]

    async def abort(self, rid) -> None:
        self.aborted.append(rid)

    def completion(self, answer: str) -> Completion:
        ids = [ord(answer), STOP]
        return Completion(
            rid="r",
            output_ids=ids,
            logprobs=[-0.5, 1e-9],
            finish_reason=FinishReason(type=self.finish),
            weight_version="3",
            weight_versions=[VersionSpan(version="3", start=0, end=2)],
            num_prompt_tokens=1,
        )


def step(generator: RolloutGenerator, cursor: PromptCursor, number: int = 1):
    return asyncio.run(generator.step(cursor, number))


SPREAD, EQUAL = "01", "11"


def generator(sampler: FakeSampler, **values) -> RolloutGenerator:
    return RolloutGenerator(config(**values), sampler, FakePool(), FakeEncoding(), (STOP,))


def test_without_over_sampling_one_wave_is_generated_and_what_has_spread_is_trained(tmp_path):
    cursor = cursor_over(tmp_path, [1, 1, 1])
    batch = step(generator(FakeSampler({0: EQUAL, 1: SPREAD, 2: SPREAD})), cursor)
    assert ids(p for p, _ in batch.kept) == ["p1"]
    assert [(drop.prompt.prompt_id, drop.reason) for drop in batch.dropped] == [("p0", "zero_spread")]
    assert ids(cursor.take(1)) == ["p2"]


@pytest.mark.parametrize("delays", [{}, {0: 50}, {1: 50, 3: 20}, {2: 50}])
def test_groups_are_chosen_in_prompt_order_whoever_finishes_first(tmp_path, delays):
    answers = {0: EQUAL, 1: SPREAD, 2: SPREAD, 3: SPREAD}
    sampler = FakeSampler(answers, delays)
    cursor = cursor_over(tmp_path, [1] * 6)
    batch = step(generator(sampler, over_sampling=4), cursor)
    assert ids(p for p, _ in batch.kept) == ["p1", "p2"]
    assert ids(drop.prompt for drop in batch.dropped) == ["p0"]
    assert ids(cursor.take(2)) == ["p3", "p4"]  # p3 was generated for nothing; it comes first in the next step


def test_a_request_that_is_not_needed_any_more_is_aborted(tmp_path):
    sampler = FakeSampler(dict.fromkeys(range(4), SPREAD), {3: 10_000})
    step(generator(sampler, over_sampling=4), cursor_over(tmp_path, [1] * 4))
    assert sampler.aborted == ["step-1-p3@0"]


def test_a_group_given_up_while_its_reward_is_computed_leaves_the_pool_its_futures(tmp_path):
    late: list[Future[SampleReward]] = []

    class LatePool(FakePool):
        def submit_group(self, prompt, completions, *, reported=()):
            if prompt["prompt_id"] != "p3":
                return super().submit_group(prompt, completions)
            late.extend(Future() for _ in completions)
            return late

    sampler = FakeSampler(dict.fromkeys(range(4), SPREAD), {0: 50, 1: 50})
    made = RolloutGenerator(config(over_sampling=4), sampler, LatePool(), FakeEncoding(), (STOP,))
    step(made, cursor_over(tmp_path, [1] * 4))
    assert len(late) == 2 and not any(future.cancelled() for future in late)


def test_with_over_sampling_waves_follow_until_enough_groups_pass(tmp_path):
    answers = dict.fromkeys(range(6), EQUAL) | {4: SPREAD, 5: SPREAD}
    batch = step(generator(FakeSampler(answers), over_sampling=2), cursor_over(tmp_path, [1] * 6))
    assert ids(p for p, _ in batch.kept) == ["p4", "p5"] and len(batch.dropped) == 4


def test_a_rollout_says_what_was_sampled_by_whom_and_why_it_ended(tmp_path):
    batch = step(generator(FakeSampler({0: SPREAD, 1: SPREAD})), cursor_over(tmp_path, [3, 1]))
    first, second = batch.kept[0][1]
    assert first.group_id == "p0@0" and (first.sample_index, second.sample_index) == (0, 1)
    assert first.prompt_token_ids == (1, 1, 1) and first.sampled_token_ids == (ord("0"), STOP)
    span = first.spans[1]
    assert span.mask == (1, 1) and span.versions == (3, 3)  # the stop token is trained too
    assert span.logprobs == (-0.5, 0.0) and first.finish_reason == "stop"
    assert (first.reward, second.reward) == (0.0, 1.0)


def test_a_sample_whose_reward_failed_is_left_out_and_a_group_of_one_is_dropped(tmp_path):
    sampler = FakeSampler({0: "?01", 1: "?0?"})
    values = {"samples_per_prompt": 3, "max_failed_rewards": 0.5}
    batch = step(generator(sampler, **values), cursor_over(tmp_path, [1] * 2))
    ((_, group),) = batch.kept
    assert [rollout.sample_index for rollout in group] == [1, 2]
    assert [rollout.sample_index for rollout in batch.failed] == [0] and len(batch.all_rollouts) == 6
    assert [drop.reason for drop in batch.dropped] == ["reward_failed"]
    assert batch.dropped[0].rollouts[0].metadata == {"reward_error": "no number"}


def test_groups_of_one_are_trained_where_nothing_is_compared(tmp_path):
    values = {"samples_per_prompt": 1, "advantage": "reinforce_pp", "filters": [], "max_failed_rewards": 0.5}
    batch = step(generator(FakeSampler({0: "1", 1: "?"}), **values), cursor_over(tmp_path, [1] * 2))
    assert [len(group) for _, group in batch.kept] == [1]
    assert [drop.reason for drop in batch.dropped] == ["reward_failed"]


def answers_with_failures(count: int) -> dict[int, str]:
    """Of eight prompts with two samples each, so many with one that fails."""
    return {n: "?1" if n < count else SPREAD for n in range(8)}


def test_a_share_of_failed_rewards_above_the_limit_ends_the_stage_with_share_setting_and_reason(tmp_path):
    made = generator(FakeSampler(answers_with_failures(5)), prompts_per_step=8)
    with pytest.raises(StageFailed) as raised:
        step(made, cursor_over(tmp_path, [1] * 8), number=3)
    message = str(raised.value)
    assert "reward failed for 5 of 16 samples of step 3 (31.2%). The first reason: no number." in message
    assert "max_failed_rewards 0.25" in message and "reward_timeout_s" in message


@pytest.mark.parametrize("limit", [0.25, 1.0])
def test_when_every_reward_of_a_step_fails_the_stage_ends_whatever_the_limit(tmp_path, limit):
    made = generator(FakeSampler({0: "??", 1: "??"}), max_failed_rewards=limit)
    with pytest.raises(StageFailed, match=r"4 of 4 samples .* no number"):
        step(made, cursor_over(tmp_path, [1] * 2))


def test_failed_rewards_below_the_limit_are_said_once_a_step(tmp_path, caplog):
    step(generator(FakeSampler(answers_with_failures(3)), prompts_per_step=8), cursor_over(tmp_path, [1] * 8))
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert said.getMessage().startswith("The reward failed for 3 of 16 samples of step 1 (18.8%). The first reason: no")


def test_one_failed_reward_of_a_hundred_is_not_worth_a_word(tmp_path, caplog):
    answers = dict.fromkeys(range(50), SPREAD) | {7: "?1"}
    step(generator(FakeSampler(answers), prompts_per_step=50), cursor_over(tmp_path, [1] * 50))
    assert caplog.records == []


def test_failed_rewards_of_an_evaluation_end_the_stage_too(tmp_path):
    made = generator(FakeSampler({0: "?", 1: "1"}))
    with pytest.raises(StageFailed, match=r"1 of 2 samples of an evaluation \(50.0%\)"):
        asyncio.run(made.answers(cursor_over(tmp_path, [1] * 2).take(2)))


class MendedPool(FakePool):
    """The function after its repair: what failed is worth 0.5."""

    def _score(self, completion) -> "Future[SampleReward]":
        future: Future[SampleReward] = Future()
        future.set_result(SampleReward(0.5 if completion == "?" else float(completion), {}))
        return future


def judged_again(batches, cursor, folder, pool, **values):
    """As a checkpoint of step 0 has them, by a stage that was started again."""
    read = []
    for number, batch in enumerate(batches):
        write_batch(folder / f"batch-{number}.json", batch)
        read.append(read_batch(folder / f"batch-{number}.json"))
    made = RolloutGenerator(config(**values), FakeSampler({}), pool, FakeEncoding(), (STOP,))
    return asyncio.run(made.judged_again(cursor, 0, read))


def test_rewards_that_failed_are_computed_again_when_a_checkpoint_is_read(tmp_path):
    values = {"prompts_per_step": 4, "max_failed_rewards": 0.5}
    answers = {0: "??", 1: SPREAD, 2: EQUAL, 3: "?1"}
    cursor = cursor_over(tmp_path, [1] * 4)
    before = step(generator(FakeSampler(answers), **values), cursor)
    assert ids(prompt for prompt, _ in before.kept) == ["p1"] and len(before.dropped) == 3
    (after,) = judged_again([before], cursor, tmp_path, MendedPool(), **values)
    assert [(p.prompt_id, [r.reward for r in group]) for p, group in after.kept] == [("p1", [0, 1]), ("p3", [0.5, 1])]
    assert [(drop.prompt.prompt_id, drop.reason) for drop in after.dropped] == [
        ("p0", "zero_spread"),
        ("p2", "zero_spread"),
    ]
    assert not any("reward_error" in rollout.metadata for rollout in after.all_rollouts)


def test_rewards_that_fail_again_leave_a_batch_as_it_was(tmp_path):
    values = {"prompts_per_step": 4, "samples_per_prompt": 3, "max_failed_rewards": 0.5}
    answers = {0: "?01", 1: "???", 2: "011", 3: "1?1"}
    cursor = cursor_over(tmp_path, [1] * 4)
    before = step(generator(FakeSampler(answers), **values), cursor)
    (after,) = judged_again([before], cursor, tmp_path, FakePool(), **values)
    assert after == before and len(before.failed) == 1 and len(before.dropped) == 2


def test_groups_beyond_those_that_a_step_trains_go_back_to_the_cursor_when_others_are_mended(tmp_path):
    values = {"prompts_per_step": 2, "over_sampling": 4, "max_failed_rewards": 0.5}
    cursor = cursor_over(tmp_path, [1] * 5)
    before = step(generator(FakeSampler({0: "?1", 1: SPREAD, 2: SPREAD, 3: SPREAD}), **values), cursor)
    assert ids(prompt for prompt, _ in before.kept) == ["p1", "p2"]
    (after,) = judged_again([before], cursor, tmp_path, MendedPool(), **values)
    assert ids(prompt for prompt, _ in after.kept) == ["p0", "p1"] and after.dropped == []
    assert ids(cursor.take(3)) == ["p2", "p3", "p4"]


def test_groups_that_several_batches_give_back_keep_the_order_of_their_prompts(tmp_path):
    values = {"prompts_per_step": 2, "over_sampling": 4, "max_failed_rewards": 0.5}
    cursor = cursor_over(tmp_path, [1] * 8)
    made = generator(FakeSampler(dict.fromkeys(range(8), SPREAD) | {0: "?1", 3: "?1"}), **values)
    first, second = step(made, cursor), step(made, cursor, number=2)
    assert [ids(p for p, _ in batch.kept) for batch in (first, second)] == [["p1", "p2"], ["p4", "p5"]]
    after = judged_again([first, second], cursor, tmp_path, MendedPool(), **values)
    assert [ids(p for p, _ in batch.kept) for batch in after] == [["p0", "p1"], ["p3", "p4"]]
    assert ids(cursor.take(4)) == ["p2", "p5", "p6", "p7"]


def test_a_function_mended_in_part_still_ends_the_stage_above_the_limit(tmp_path):
    cursor = cursor_over(tmp_path, [1] * 8)
    values = {"prompts_per_step": 8}
    before = step(generator(FakeSampler(answers_with_failures(4)), **values), cursor)
    with pytest.raises(StageFailed, match=r"max_failed_rewards 0\.1"):
        judged_again([before], cursor, tmp_path, FakePool(), **values, max_failed_rewards=0.1)


def test_an_aborted_sample_is_an_error_of_the_sampler(tmp_path):
    with pytest.raises(SamplerError, match="ended request"):
        step(generator(FakeSampler({0: SPREAD, 1: SPREAD}, finish="abort")), cursor_over(tmp_path, [1] * 2))


def test_a_groups_seed_depends_on_stage_step_and_prompt_alone(tmp_path):
    sampler = FakeSampler({0: SPREAD, 1: SPREAD})
    step(generator(sampler), cursor_over(tmp_path, [1] * 2), number=4)
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
    saved = cursor.state_dict()
    again = cursor_over(tmp_path, [1] * 5)
    again.load_state_dict(saved)
    assert ids(again.take(3)) == ["p2", "p3", "p4"]


def test_overlong_prompts_are_dropped_and_handed_to_the_ledger_once(tmp_path):
    cursor = cursor_over(tmp_path, [1, 11, 1], longest=10)
    assert ids(cursor.take(2)) == ["p0", "p2"]
    assert [(p.prompt_id, reason) for p, reason in cursor.passed_over()] == [("p1", "prompt_too_long")]
    assert cursor.passed_over() == []


def test_a_share_of_the_prompts_without_spread_is_passed_over_in_the_next_pass_and_comes_again_later(tmp_path):
    cursor = cursor_over(tmp_path, [1] * 40, skip_share=0.5, seed=3)
    batch = step(
        generator(FakeSampler({n: SPREAD if n < 10 else EQUAL for n in range(40)}), prompts_per_step=40), cursor
    )
    assert len(batch.kept) == 10 and batch.passed_over == []
    second = ids(cursor.take(10))
    assert second == [f"p{n}" for n in range(10)]  # those with spread are never passed over
    saved = cursor.state_dict()
    rest = cursor.take(30 - 15)
    skipped = ids(prompt for prompt, reason in cursor.passed_over() if reason == "no_spread_before")
    assert 5 <= len(skipped) <= 25
    again = cursor_over(tmp_path, [1] * 40, skip_share=0.5, seed=3)
    again.load_state_dict(saved)
    assert ids(again.take(15)) == ids(rest)
    third = {prompt.prompt_id for prompt in cursor.take(120) if prompt.epoch > 1}
    assert third & set(skipped)


def test_a_group_whose_reward_failed_is_no_reason_to_pass_its_prompt_over(tmp_path):
    cursor = cursor_over(tmp_path, [1] * 20, skip_share=0.95)
    answers = {n: "?1" if n % 2 else SPREAD for n in range(20)}
    step(generator(FakeSampler(answers), prompts_per_step=20), cursor)
    assert ids(cursor.take(20)) == [f"p{n}" for n in range(20)] and cursor.passed_over() == []


def test_without_a_curriculum_nothing_is_passed_over(tmp_path):
    cursor = cursor_over(tmp_path, [1] * 4)
    step(generator(FakeSampler(dict.fromkeys(range(4), EQUAL)), prompts_per_step=4), cursor)
    assert ids(cursor.take(4)) == ["p0", "p1", "p2", "p3"] and cursor.passed_over() == []


def test_a_prompt_that_finds_spread_again_is_tried_in_every_pass(tmp_path):
    cursor = cursor_over(tmp_path, [1], skip_share=0.95)
    cursor.note("p0", has_spread=False)
    cursor.note("p0", has_spread=True)
    assert [prompt.epoch for prompt in cursor.take(5)] == [0, 1, 2, 3, 4]


def test_only_overlong_prompts_are_an_error_not_an_endless_search(tmp_path):
    with pytest.raises(ConfigError, match="have more than 10 tokens"):
        cursor_over(tmp_path, [11], longest=10).take(1)


def test_the_ledger_drops_lines_of_steps_that_are_done_again_and_half_a_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    prompts = cursor_over(tmp_path, [1] * 3).take(3)
    ledger = StepLines(path, resume_step=0)
    for number, prompt in enumerate(prompts, start=1):
        ledger.write({"step": number, "prompt_id": prompt.prompt_id})
    ledger.close()
    with path.open("a") as stream:
        stream.write('{"step": 9, "ep')
    StepLines(path, resume_step=2).close()
    assert [(line["step"], line["prompt_id"]) for line in read_ledger(path)] == [(1, "p0"), (2, "p1")]


class EndingSampler(FakeSampler):
    """Ends what it is asked for after two tokens, when new weights come; of the weights each answer has its number."""

    async def generate(self, requests):
        (request,) = requests
        self.requests.append(request)
        begun = list(request.input_ids[1:])
        wholes = [[*map(ord, answer), STOP] for answer in self.answers[0]]
        answers = [whole[len(begun) :] for whole in wholes if whole[: len(begun)] == begun]
        assert len(answers) == request.params.n
        return [[self.part(str(request.rid), rest, str(len(self.requests))) for rest in answers]]

    def part(self, rid, rest, version) -> Completion:
        part = rest[:2]  # its reason is `abort` also where it has met its end
        return Completion(
            rid=rid,
            output_ids=part,
            logprobs=[-float(version)] * len(part),
            finish_reason=FinishReason(type="abort"),
            weight_version=version,
            weight_versions=[VersionSpan(version=version, start=0, end=len(part))],
            num_prompt_tokens=1,
        )


def ended_by_syncs(tmp_path, answers, **values):
    sampler = EndingSampler({0: answers})
    values |= {"max_staleness": 1, "sampler": {"deterministic": False}, "prompts_per_step": 1}
    made = RolloutGenerator(config(sync_mode="abort", **values), sampler, FakePool(), FakeEncoding(), (STOP,))
    ((_, group),) = step(made, cursor_over(tmp_path, [1])).kept
    return group, sampler.requests


def test_what_new_weights_end_is_resumed_from_its_last_token(tmp_path):
    (short, long), (first, *rest) = ended_by_syncs(tmp_path, ["321", "12345"], max_new_tokens=9)
    assert [list(one.response_token_ids) for one in (short, long)] == [[*map(ord, "321"), 0], [*map(ord, "12345"), 0]]
    assert (short.reward, long.reward) == (321.0, 12345.0)
    assert [one.finish_reason for one in (short, long)] == ["stop", "stop"]
    of_rest = {tuple(request.input_ids): request for request in rest}
    assert set(of_rest) == {(1, *map(ord, begun)) for begun in ("32", "12", "1234")}
    assert [of_rest[1, *map(ord, begun)].params.max_new_tokens for begun in ("32", "12", "1234")] == [7, 7, 5]
    assert len({r.rid for r in (first, *rest)}) == len({r.params.sampling_seed for r in (first, *rest)}) == 4
    versions = long.spans[1].versions
    assert versions[:2] == (1, 1) and versions[2] == versions[3] < versions[4] == versions[5]
    assert [-logprob for logprob in long.spans[1].logprobs] == list(versions)


def test_what_is_ended_at_its_last_token_is_whole(tmp_path):
    """SGLang says `abort` there, without a look at stop tokens and length."""
    (stopped, cut), requests = ended_by_syncs(tmp_path, ["1", "2345"], max_new_tokens=4)
    assert list(stopped.response_token_ids) == [ord("1"), STOP] and stopped.finish_reason == "stop"
    assert list(cut.response_token_ids) == [*map(ord, "2345")] and cut.finish_reason == "length"
    assert [request.params.max_new_tokens for request in requests] == [4, 2]


def test_what_ends_early_where_no_sync_ends_anything_is_an_error(tmp_path):
    with pytest.raises(SamplerError, match="ended request"):
        step(generator(EndingSampler({0: ["1", "12345"]}), prompts_per_step=1), cursor_over(tmp_path, [1]))


@pytest.mark.parametrize(
    ("values", "asked"),
    [({}, (1, 0.0)), ({"eval_temperature": 0.8, "eval_samples": 2}, (2, 0.8)), ({"eval_temperature": 0.5}, (1, 0.5))],
)
def test_an_evaluation_asks_for_as_many_answers_at_the_temperature_that_the_config_says(tmp_path, values, asked):
    sampler = FakeSampler({0: SPREAD, 1: SPREAD})
    made = generator(sampler, temperature=1.5, **values)
    found = [asyncio.run(made.answers(cursor_over(tmp_path, [1] * 2).take(2))) for _ in range(2)]
    assert {(request.params.n, request.params.temperature) for request in sampler.requests} == {asked}
    wanted = [(f"p{number}", index) for number in range(2) for index in range(asked[0])]
    assert [(rollout.prompt_id, rollout.sample_index) for rollout in found[0]] == wanted
    seeds = [request.params.sampling_seed for request in sampler.requests]
    assert seeds[:2] == seeds[2:]  # each evaluation draws with the same ones
    assert seeds[0] != seeds[1] if values else seeds == [None] * 4


def test_held_out_prompts_that_are_too_long_are_said(tmp_path, caplog):
    rows = [{"prompt": f"{number}x{length}", "answer": "", "prompt_id": f"p{number}"} for number, length in
            enumerate([1, 4, 2, 3])]  # fmt: skip
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(url=f"file:{tmp_path}/held_out.jsonl")
    mixture = Mixture([source], kind="prompt", seed=0, part="all", once=True, shuffle=False)
    prompts, num_too_long = first_prompts(mixture, FakeRenderer(), count=10, longest=2)
    assert (ids(prompts), num_too_long) == (["p0", "p2"], 2)
    (said,) = caplog.records
    assert said.getMessage().startswith("Not evaluated: 2 held-out prompts of more than 2 tokens, what sampler.context")


def test_several_answers_at_temperature_0_are_refused():
    with pytest.raises(ValueError, match="eval_samples 4 would all be the same answer at eval_temperature 0"):
        config(eval_samples=4)


def test_an_evaluation_asks_for_whole_responses_also_where_training_asks_for_parts(tmp_path):
    sampler = FakeSampler({0: SPREAD, 1: SPREAD})
    made = generator(sampler, partial_rollout_tokens=3, over_sampling=4)
    asyncio.run(made.answers(cursor_over(tmp_path, [1] * 2).take(2)))
    assert {request.params.max_new_tokens for request in sampler.requests} == {made._config.rollout.max_new_tokens}
