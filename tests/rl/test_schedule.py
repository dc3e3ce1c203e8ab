"""Who runs beside whom, with which weights, and where a checkpoint can be written. The work is a fake that we own."""

import asyncio
from contextlib import nullcontext
from functools import partialmethod
from pathlib import Path

import pytest

from nanodag.errors import SamplerError, StageFailed
from nanodag.rl.control.checks import check_totals
from nanodag.rl.control.schedule import Position, Schedule, StopRequested
from nanodag.rl.rollouts.batch import RolloutBatch

STEPS = 5


class FakeWork:
    """Notes what is called. Each call takes as many rounds of the event loop as `slow` says for its kind. changes:
    rollout batches may get new weights in their midst. kept: weights that may be loaded without being published."""

    def __init__(self, *, evals=(), saves=(), slow=(), stop_at=None, fail=None, changes=False, kept=()) -> None:
        self.evals, self.saves, self.slow = set(evals), set(saves), dict(slow)
        self.stop_at, self.fail, self.stopping, self.changes, self.kept = stop_at, fail, False, changes, kept
        self.log: list[tuple] = []
        self.loaded = None
        self.positions: list[Position] = []
        self.seen: dict[int, list[int]] = {}  # the policies that sampled a step's batch, in each round
        self.busy: set[str] = set()
        self.beside: set[frozenset] = set()
        self.num_used = 0  # rollout batches whose prompts count as used

    @property
    def sampled_by(self):
        return {step: self.seen[step][0] for step in of(self, "generate")}

    async def takes(self, kind: str, number: int) -> None:
        if self.stop_at == (kind, number):
            self.stopping = True
        if self.fail is not None and self.fail[:2] == (kind, number):
            raise self.fail[2]
        self.busy.add(kind)
        for _ in range(self.slow.get(kind, 3)):
            await asyncio.sleep(0)
            self.beside.add(frozenset(self.busy))
            if kind == "generate":
                self.seen[number].append(self.loaded)
        if self.stop_at == (kind, number):
            await asyncio.sleep(0.3)  # until the watch has seen it
        self.busy.discard(kind)
        self.log.append((kind, number))

    async def load(self, policy):
        self.loaded = policy
        assert ("publish", policy) in self.log or policy in self.kept
        await self.takes("load", policy)

    async def generate(self, step):
        self.seen[step] = [self.loaded]  # begun again after a stop
        await self.takes("generate", step)
        if self.stopping and not self.changes:
            raise StopRequested
        assert self.changes or {*self.seen[step]} == {self.loaded}
        self.num_used = step
        return RolloutBatch(seconds=step)

    def is_evaluation_due(self, policy):
        return policy in self.evals

    async def evaluate(self, policy):
        if policy not in self.evals:
            return
        assert self.loaded == policy
        await self.takes("evaluate", policy)
        assert self.loaded == policy
        self.evals.discard(policy)

    async def train(self, step, batch):
        assert batch.seconds == step
        await self.takes("train", step)

    publish = partialmethod(takes, "publish")

    def note(self, step):
        self.log.append(("note", step))

    def is_checkpoint_due(self, step):
        return step in self.saves

    async def save(self, position):
        self.check_that_nothing_is_lost(position)
        self.positions.append(position)
        await self.takes("save", position.step)

    def check_that_nothing_is_lost(self, position):
        assert self.num_used in (0, position.step + len(position.waiting))  # 0: gone on from a checkpoint

    def check(self): ...

    def is_stop_requested(self):
        return self.stopping


def schedule(work: FakeWork, lag: int, **options) -> Schedule:
    base = {"num_steps": STEPS, "begins": Position(), "timed": lambda name: nullcontext(), "is_exact": True}
    return Schedule(work, lag=lag, **{**base, **options})


def run_schedule(work: FakeWork, lag: int, **options) -> FakeWork:
    asyncio.run(schedule(work, lag, **options).run())
    return work


def of(work: FakeWork, kind: str) -> list[int]:
    return [number for found, number in work.log if found == kind]


SPEEDS = [{}, {"train": 40}, {"generate": 40}, {"evaluate": 60, "publish": 9}]
ALL = list(range(1, STEPS + 1))


def exact(lag: int) -> dict[int, int]:
    """Which policy samples each step's batch."""
    return {step: max(0, step - 1 - lag) for step in ALL}


@pytest.mark.parametrize("keeps_trainer", [False, True])
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("slow", SPEEDS)
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_the_weights_of_a_batch_follow_from_its_step_and_the_lag_alone(lag, slow, is_exact, keeps_trainer):
    work = FakeWork(evals=(0, 2, 5), saves=(2, 4), slow=slow)
    run_schedule(work, lag, is_exact=is_exact, keeps_trainer=keeps_trainer)
    assert of(work, "train") == of(work, "note") == ALL and of(work, "evaluate") == [0, 2, 5]
    assert all(step - 1 - policy <= lag for step, policy in work.sampled_by.items())
    if is_exact:
        assert work.sampled_by == exact(lag) and of(work, "save") == [2, 4]
    assert any({"train", "generate"} <= both for both in work.beside) == (lag > 0)
    if keeps_trainer:  # no step changes weights that the samplers are still to take
        for policy in of(work, "load"):  # noted when it ends, as a step is: no later step is before it
            later = range(policy + 1, STEPS + 1)
            assert all(work.log.index(("train", step)) > work.log.index(("load", policy)) for step in later)
        assert frozenset({"load", "train"}) not in work.beside


@pytest.mark.parametrize("slow", SPEEDS)
@pytest.mark.parametrize("is_exact", [True, False])
def test_in_turns_nothing_of_the_samplers_runs_beside_a_step(slow, is_exact):
    sides = ({"train", "publish"}, {"load", "generate", "evaluate"})
    for takes_turns in (True, False):
        work = FakeWork(evals=(0, 2, 5), saves=(2, 4), slow=slow)
        run_schedule(work, 0, takes_turns=takes_turns, is_exact=is_exact)
        assert of(work, "train") == ALL and of(work, "evaluate") == [0, 2, 5]
        overlaps = [busy for busy in work.beside if all(busy & side for side in sides)]
        assert not overlaps if takes_turns else (overlaps or "evaluate" not in slow)
    resumed = FakeWork(evals=(2,), slow=slow)
    resumed.log.append(("publish", 2))
    position = Position(step=2, policy=2, waiting=(RolloutBatch(seconds=3),))
    run_schedule(resumed, 0, takes_turns=True, is_exact=is_exact, begins=position)
    assert of(resumed, "train") == [3, 4, 5] and of(resumed, "evaluate") == [2]


def test_with_a_lag_a_step_trains_while_weights_are_evaluated():
    work = run_schedule(FakeWork(evals=(2,), slow={"train": 30}), 1)
    assert any({"evaluate", "train"} <= busy for busy in work.beside)


@pytest.mark.parametrize(("lag", "saves", "last"), [(0, (), 2), (0, (2,), 2), (2, (3,), 3), (2, (), 4)])
def test_an_evaluation_may_end_the_stage_before_anything_is_sampled_by_its_weights(lag, saves, last):
    work = FakeWork(evals=(0, 2, 4), saves=saves, slow={"evaluate": 60})
    run_schedule(work, lag, is_over=lambda: 2 not in work.evals)
    assert of(work, "evaluate") == [0, 2] and of(work, "train") == of(work, "note") == ALL[:last]
    assert max(work.sampled_by.values()) < 2 and not work.busy


def test_a_stage_that_was_over_when_it_was_stopped_ends_at_once():
    position = Position(2, 1, (RolloutBatch(seconds=3),))
    work = run_schedule(FakeWork(kept=(1,)), 1, begins=position, is_over=lambda: True)
    assert of(work, "train") == of(work, "generate") == of(work, "load") == []


def test_no_more_batches_than_the_lag_wait_behind_the_one_that_trains():
    log = run_schedule(FakeWork(slow={"train": 90}), 2).log
    ended = [[kind for kind, _ in log[: log.index(("train", step))]].count("generate") - step for step in ALL]
    assert max(ended) == 2


def test_the_last_weights_are_published_only_to_be_evaluated():
    assert of(run_schedule(FakeWork(), 1), "publish") == [0, 1, 2, 3, 4]
    assert of(run_schedule(FakeWork(evals=(5,)), 1), "publish") == [0, 1, 2, 3, 4, 5]


def test_where_bytes_are_not_promised_the_newest_weights_sample():
    work = run_schedule(FakeWork(slow={"generate": 40}), 3, is_exact=False)
    assert work.sampled_by[STEPS] > STEPS - 1 - 3


IN_FLIGHT = {"is_exact": False, "loads_in_flight": True}
LONG = [{"generate": 200}, {"generate": 200, "load": 30}]


@pytest.mark.parametrize("slow", [*SPEEDS, *LONG, {"generate": 30, "evaluate": 200}])
@pytest.mark.parametrize("keeps_trainer", [False, True])
@pytest.mark.parametrize("lag", [1, 3])
def test_weights_may_come_in_the_midst_of_a_batch_but_never_while_they_are_evaluated(lag, keeps_trainer, slow):
    # an evaluation sees that its weights stay
    work = FakeWork(evals=(0, 2, 3, 5), saves=(1, 2, 3, 4), slow=slow, changes=True)
    run_schedule(work, lag, keeps_trainer=keeps_trainer, **IN_FLIGHT)
    assert of(work, "train") == of(work, "note") == of(work, "generate") == ALL
    assert of(work, "evaluate") == [0, 2, 3, 5] and of(work, "load") == sorted(set(of(work, "load")))
    for step, policies in work.seen.items():
        assert policies == sorted(policies) and policies[0] >= step - 1 - lag and policies[-1] < step
    if keeps_trainer:
        assert frozenset({"load", "train"}) not in work.beside
    if slow in LONG:
        assert any(len(set(policies)) > 1 for policies in work.seen.values())
        assert any({"load", "generate"} <= both for both in work.beside)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_from_every_checkpoint_the_rest_is_sampled_by_the_same_weights(lag):
    whole = run_schedule(FakeWork(evals=(0, 3), saves=range(1, STEPS)), lag)
    assert [position.step for position in whole.positions] == [1, 2, 3, 4]
    for position in whole.positions:
        assert position.policy >= position.step  # no older weights are needed
        rest = run_schedule(FakeWork(evals={t for t in (0, 3) if t >= position.policy}), lag, begins=position)
        waiting = {position.step + 1 + n for n in range(len(position.waiting))}
        assert rest.sampled_by == {s: t for s, t in whole.sampled_by.items() if s > position.step and s not in waiting}
        assert of(rest, "train") == list(range(position.step + 1, STEPS + 1))


MOMENTS = [("generate", 1), ("generate", 4), ("train", 2), ("train", 5), ("evaluate", 2)]


@pytest.mark.parametrize(
    ("lag", "slow", "options", "moment"),
    [
        *((lag, {"evaluate": 20}, {}, moment) for lag in (0, 1, 2) for moment in MOMENTS),
        *((1, {"generate": 60}, IN_FLIGHT, moment) for moment in (*MOMENTS[1:], ("load", 1))),
    ],
)
async def test_asked_to_stop_a_step_is_finished_and_the_rest_follows_from_where_it_stopped(lag, slow, options, moment):
    work = FakeWork(evals=(0, 2, 5), slow=slow, stop_at=moment, changes=bool(options))
    begun = schedule(work, lag, **options)
    with pytest.raises(StopRequested):
        await begun.run()
    assert not any("_batch" in repr(task.get_coro()) for task in asyncio.all_tasks())
    position = begun.position
    work.check_that_nothing_is_lost(position)
    if not options:
        assert position.step == max([0, *of(work, "train")]) == max([0, *of(work, "note")])
    assert position.policy <= position.step + 1
    kept = range(position.policy, position.step)  # the controller keeps these weights in the checkpoint
    rest = FakeWork(evals=work.evals, slow=slow, changes=bool(options), kept=kept)
    await schedule(rest, lag, begins=position, **options).run()
    assert of(work, "train") + of(rest, "train") == ALL and of(work, "evaluate") + of(rest, "evaluate") == [0, 2, 5]
    assert options or work.sampled_by | rest.sampled_by == exact(lag)


@pytest.mark.parametrize("options", [{}, IN_FLIGHT])
@pytest.mark.parametrize("kind", ["generate", "train", "evaluate", "load", "publish"])
async def test_an_error_on_either_side_ends_both_and_the_batch_that_is_under_way(options, kind):
    fail, slow = (kind, 2, StageFailed("broken")), {"generate": 60} if options else {}
    work = FakeWork(evals=(2,), fail=fail, slow=slow, changes=bool(options))
    with pytest.raises(StageFailed, match="broken"):
        await schedule(work, 1, **options).run()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_sampler_that_the_stop_signal_ended_is_no_error():
    work = FakeWork(fail=("generate", 3, SamplerError("gone")))
    work.is_stop_requested = lambda: ("train", 1) in work.log
    with pytest.raises(StopRequested):
        run_schedule(work, 1)
    assert of(work, "note") == of(work, "train")


@pytest.mark.parametrize("error", [StopRequested(), SamplerError("ended by the signal too")])
def test_in_turns_no_step_begins_once_a_stop_is_asked_for_though_the_watch_has_not_seen_it(error):
    work = FakeWork()

    async def evaluate(policy):
        await asyncio.sleep(0.02)  # the batch is ready, and its step waits for the turn
        work.stopping = True
        raise error

    work.is_evaluation_due, work.evaluate = (lambda policy: policy == 0), evaluate
    with pytest.raises(StopRequested):
        run_schedule(work, 0, takes_turns=True)
    assert of(work, "generate") == [1] and of(work, "train") == []


def test_a_checkpoint_that_counts_other_totals_is_refused_in_a_line():
    check_totals(Path("7"), {"sampled": 1, "scored": 2}, {"scored": 0, "sampled": 0})
    with pytest.raises(StageFailed, match=r"Checkpoint 7 was saved by another version"):
        check_totals(Path("7"), {"sampled": 1}, {"sampled": 0, "scored": 0})
