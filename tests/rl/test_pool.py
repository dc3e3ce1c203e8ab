"""Which groups a step takes from the pool, what it waits for, and that nothing is lost. Samplers are simulated."""

import asyncio

import pytest

from benchmarks.pool import run
from nanodag.config.derive_sampler import derive_sampler
from nanodag.errors import SamplerError, StageFailed
from nanodag.rl.control.pool import RolloutPool, most_in_flight
from nanodag.rl.rollouts.batch import RolloutBatch, read_batch, write_batch
from nanodag.rl.rollouts.prompts import PromptCursor
from tests.engines.fake_samplers import World
from tests.rl import fakes
from tests.rl.fakes import EQUAL, SPREAD, FakePool, FakeSampler
from tests.rl.stages import MACHINE, on
from tests.virtual_clock import run_without_waiting


class HeldSampler(FakeSampler):
    """Answers a prompt when it is let go; SPREAD where nothing else is said. begun: the prompts' numbers."""

    def __init__(self, of: dict[int, str] | None = None) -> None:
        self.begun: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        plain = fakes.answers({number: SPREAD for number in range(99)} | (of or {})).says

        async def says(request):
            number = request.input_ids[0] - 1
            self.begun.append(number)
            await self.gates.setdefault(number, asyncio.Event()).wait()
            return await plain(request)

        super().__init__(says)

    async def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.gates.setdefault(number, asyncio.Event()).set()
        await settled()


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def pool_of(
    sampler, cursor: PromptCursor, score=float, *, lag=1, max_batch=66, is_stopping=lambda: False
) -> RolloutPool:
    values = {"num_steps": 9, "max_staleness": lag, "sampler": {"max_batch": max_batch}}
    return RolloutPool(fakes.generator(sampler, FakePool(score), **values), cursor, is_stopping=is_stopping)


async def taking(pool: RolloutPool, step: int) -> "asyncio.Task[RolloutBatch]":
    task = asyncio.create_task(pool.take(step))
    await settled()
    return task


async def begun(tmp_path, of=None, lengths=(1,) * 20, **more):
    """A sampler, a pool, and its first step, under way."""
    sampler = HeldSampler(of)
    pool = pool_of(sampler, fakes.cursor_over(tmp_path, list(lengths)), **more)
    return sampler, pool, await taking(pool, 1)


async def test_a_slow_group_holds_up_nobody_until_it_is_due(tmp_path):
    sampler, pool, first = await begun(tmp_path)
    assert sampler.begun == [0, 1, 2, 3]  # what steps 1 and 2 train
    await sampler.let_go(1, 3)
    assert fakes.kept(await first) == ["p1", "p3"]
    pool.samplers_have(1)
    second = await taking(pool, 2)
    assert sampler.begun == [0, 1, 2, 3, 4, 5]
    await sampler.let_go(2, 4, 5)
    assert not second.done()  # p0 began with policy 0, which is fresh enough for step 2 and for no later one
    await sampler.let_go(0)
    found = await second
    assert fakes.kept(found) == ["p0", "p2"] and found.pool["groups_done"] == 2.0
    pool.samplers_have(2)
    assert fakes.kept(await pool.take(3)) == ["p4", "p5"]


async def test_a_step_takes_old_groups_in_time_for_those_that_the_next_one_could_not_train(tmp_path):
    sampler, pool, first = await begun(tmp_path, lag=2)
    await sampler.let_go(4, 5)  # of 0 to 5, all of policy 0
    await first
    pool.samplers_have(1)
    second = await taking(pool, 2)
    await sampler.let_go(6, 7)
    assert not second.done()  # 0 to 3 are due in step 3, which trains two of them
    await sampler.let_go(1)
    assert not second.done()
    await sampler.let_go(3)
    assert fakes.kept(await second) == ["p1", "p3"]


async def test_a_group_that_is_dropped_makes_room_for_the_next_prompt(tmp_path):
    sampler, _, first = await begun(tmp_path, {0: EQUAL, 2: EQUAL}, [1, 1, 1, 1, 11, 1, 1, 1])
    await sampler.let_go(0, 2)
    assert sampler.begun == [0, 1, 2, 3, 5, 6]
    await sampler.let_go(3, 6)
    found = await first
    assert fakes.kept(found) == ["p3", "p6"] and [name for name, _ in fakes.dropped(found)] == ["p0", "p2"]
    assert fakes.ids(prompt for prompt, _ in found.passed_over) == ["p4"]  # too long


async def test_no_more_groups_are_in_flight_than_keep_samplers_busy(tmp_path):
    sampler, _, first = await begun(tmp_path, max_batch=2)
    assert sampler.begun == [0, 1, 2]
    await sampler.let_go(1)
    assert sampler.begun == [0, 1, 2, 3] and not first.done()
    assert most_in_flight(64, 8) == 24 and most_in_flight(1, 8) == 1


async def test_where_nothing_passes_a_step_ends_with_what_it_has(tmp_path):
    sampler = fakes.answers(dict.fromkeys(range(40), EQUAL))
    found = await pool_of(sampler, fakes.cursor_over(tmp_path, [1] * 40)).take(1)
    assert found.kept == [] and len(found.dropped) >= 32


def test_what_a_group_raises_ends_the_step(tmp_path):
    async def says(request):
        if request.input_ids != [3]:
            await asyncio.sleep(3600)
        raise SamplerError("gone")

    with pytest.raises(SamplerError, match="gone"):
        asyncio.run(pool_of(FakeSampler(says), fakes.cursor_over(tmp_path, [1] * 20)).take(1))


def test_rewards_that_fail_too_often_end_the_stage(tmp_path):
    sampler = fakes.answers(dict.fromkeys(range(9), "?1"))
    with pytest.raises(StageFailed, match=r"of step 1 .* max_failed_rewards 0\.25"):
        asyncio.run(pool_of(sampler, fakes.cursor_over(tmp_path, [1] * 9)).take(1))


async def test_when_three_of_eight_samplers_are_lost_at_once_every_prompt_is_trained_once(tmp_path):
    one = {"samples_per_prompt": 1, "max_new_tokens": 1, "filters": [], "advantage": "reinforce_pp"}
    one |= {"prompts_per_step": 12, "num_steps": 2, "max_staleness": 1, "sampler": {"max_batch": 33}}
    async with asyncio.timeout(30), World(tmp_path, size=8) as world:
        made = fakes.generator(world.samplers, FakePool(lambda answer: 1.0), **one)
        cursor = fakes.cursor_over(tmp_path, [1] * 24)
        pool = RolloutPool(made, cursor)
        first = asyncio.create_task(pool.take(1))
        while sum(name == "generate" for _, name, _ in world.steps) < 24:
            await asyncio.sleep(0.001)
        for server in world.servers[2:5]:
            server.kill()
        world.may_answer.set()
        found = [await first, await pool.take(2)]
        while world.samplers.num_restarts < 3:
            await asyncio.sleep(0.001)
    assert sorted(fakes.kept(found[0]) + fakes.kept(found[1])) == sorted(f"p{number}" for number in range(24))


async def test_a_checkpoint_keeps_what_is_done_and_begins_the_rest_again(tmp_path):
    before, pool, first = await begun(tmp_path, {4: EQUAL}, lag=2)
    await before.let_go(0, 1)
    await first
    second = await taking(pool, 2)
    await before.let_go(3, 4)
    assert not second.done()
    unused, done, policies = pool.state()
    write_batch(tmp_path / "pool.json", done)
    cursor = fakes.cursor_over(tmp_path, [1] * 20)
    cursor.load_state_dict(unused)
    after = HeldSampler()
    pool = pool_of(after, cursor, lag=2)
    await pool.restore(read_batch(tmp_path / "pool.json"), policies, step=1, policy=1)
    second = await taking(pool, 2)
    assert after.begun == [2, 5, 6, 7, 8]  # in flight before, in their order; then new ones
    await after.let_go(5)
    found = await second
    assert fakes.kept(found) == ["p3", "p5"] and [name for name, _ in fakes.dropped(found)] == ["p4"]


async def test_rewards_that_failed_are_computed_again_when_a_pool_is_restored(tmp_path):
    sampler, pool, first = await begun(tmp_path, {0: "??"})
    await sampler.let_go(0, 1)
    assert not first.done()
    unused, done, policies = pool.state()
    assert [drop.reason for drop in done.dropped] == ["reward_failed"]
    cursor = fakes.cursor_over(tmp_path, [1] * 9)
    cursor.load_state_dict(unused)
    pool = pool_of(HeldSampler(), cursor, fakes.mended)
    await pool.restore(done, policies, step=0, policy=0)
    _, again, _ = pool.state()
    assert fakes.kept(again) == ["p1"] and [drop.reason for drop in again.dropped] == ["zero_spread"]


async def test_what_ends_after_a_stop_was_asked_for_does_not_count(tmp_path):
    stopping: list[bool] = []
    sampler, pool, first = await begun(tmp_path, is_stopping=lambda: bool(stopping))
    await sampler.let_go(1)
    stopping.append(True)  # what computes rewards may be gone
    await sampler.let_go(0, 2)
    assert not first.done()
    unused, done, _ = pool.state()
    waiting = [saved["record"]["prompt_id"] for saved in unused["waiting"]]
    assert fakes.kept(done) == ["p1"] and waiting == ["p0", "p2", "p3"]


@pytest.mark.parametrize(
    ("values", "order"),
    [
        ({}, "prompt"),
        ({"sync_mode": "retract"}, "arrival"),
        ({"sync_mode": "retract", "order": "prompt"}, "prompt"),
        ({"sync_mode": "retract", "over_sampling": 4}, "prompt"),
    ],
)
def test_auto_takes_groups_as_they_arrive_where_requests_stay_in_flight(values, order):
    stage = fakes.config(max_staleness=1, sampler={"deterministic": False}, **on(1), **values)
    assert derive_sampler("rl", stage, MACHINE, None, {}).rollout.order == order


def test_with_lengths_of_a_heavy_tail_samplers_stay_busy_and_short_answers_are_not_favoured():
    sizes = {"steps": 12, "prompts": 32, "samples": 4, "seats": 32, "token_s": 0.01, "train": 0.5}
    found = run_without_waiting(run("arrival", 2, **sizes))
    waiting = run_without_waiting(run("prompt", 2, **sizes))
    assert found["busy"] > 0.85 > 0.6 > waiting["busy"]  # the last answers are waited for, in twelve steps too
    assert found["groups"] == 12 * 32 and found["trained"] == found["sampled"]
    assert found["length"] == pytest.approx(1.0) and found["masked"] == 0.0
    assert found["largest"] <= 2.0
