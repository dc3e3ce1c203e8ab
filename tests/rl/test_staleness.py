"""A token older than the cap is never trained, and a rollout batch that waits is the same after a restart."""

import json

import pytest

from nanodag.errors import StageFailed
from nanodag.rl.rollouts import batch as batches
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import Rollout
from tests.rl.rollouts import of_versions


def prompt(name: str) -> Prompt:
    messages = [{"role": "user", "content": name}]
    return Prompt(epoch=0, record={"prompt_id": name, "messages": messages}, token_ids=(1, 2))


def batch(*groups: list[Rollout]) -> RolloutBatch:
    return RolloutBatch(kept=[(prompt(f"p{n}"), list(group)) for n, group in enumerate(groups)])


def masks(found: RolloutBatch) -> list[tuple[int, ...]]:
    return [rollout.spans[1].mask for rollout in found.trained]


def test_staleness_counts_steps_that_changed_the_weights_not_versions_and_the_trainer_has_reached_them():
    versions = [0, 4, 8]  # four updates a step
    assert [batches.staleness_of(version, versions) for version in (8, 7, 4, 3, 0)] == [0, 1, 1, 2, 2]
    with pytest.raises(StageFailed, match="version 9 sampled it; the trainer is at version 8"):
        batches.staleness_of(9, versions)


def test_tokens_above_the_cap_are_masked_and_what_is_fresh_enough_is_left_as_it_is():
    found = batches.without_stale(batch([of_versions([0, 1, 2]), of_versions([2, 2])]), [0, 1, 2], largest=1)
    assert masks(found) == [(0, 1, 1), (1, 1)] and not found.dropped
    numbers = {"staleness": 0.25, "staleness_largest": 1.0, "masked_tokens": 1.0}
    assert batches.staleness_metrics(found.trained, [0, 1, 2]) == numbers
    assert batches.staleness_metrics([], [0]) == dict.fromkeys(numbers, 0.0)
    given = batch([of_versions([1, 2])])
    assert batches.without_stale(given, [0, 1, 2], largest=1) is given


def test_a_group_whose_every_token_is_above_the_cap_is_dropped_with_its_reason():
    found = batches.without_stale(batch([of_versions([0, 0])], [of_versions([1])]), [0, 1, 2], largest=1)
    assert [group[0].versions for _, group in found.kept] == [(1,)]
    assert [(drop.prompt.prompt_id, drop.reason) for drop in found.dropped] == [("p0", "too_stale")]


def test_older_tokens_of_partial_rollouts_are_masked_though_the_cap_would_allow_it():
    given = batch([of_versions([0, 0, 1]), of_versions([1, 1])])
    assert batches.without_stale(given, [0, 1, 2], largest=2) is given
    assert masks(batches.without_older(given)) == [(0, 0, 1), (1, 1)]
    given.failed.append(of_versions([2], reward=None))
    assert [drop.reason for drop in batches.without_older(given).dropped] == ["too_stale"]
    fresh = batch([of_versions([1, 1])])
    assert batches.without_older(fresh) is fresh


def test_a_batch_that_waits_is_written_and_read_bit_for_bit(tmp_path):
    given = RolloutBatch(
        kept=[(prompt("a"), [of_versions([1], reward=0.1 + 0.2), of_versions([1], sample=1)])],
        failed=[of_versions([1], reward=None, sample=2)],
        dropped=[batches.Dropped(prompt("b"), [of_versions([0])], "zero_spread")],
        passed_over=[(prompt("c"), "prompt_too_long")],
        num_partial=3,
        seconds=0.25,
        pool={"groups_in_flight": 2.0},
    )
    batches.write_batch(tmp_path / "batch.json", given)
    assert batches.read_batch(tmp_path / "batch.json") == given
    whole = json.loads((tmp_path / "batch.json").read_text())
    for other in (whole | {"kept": 3}, whole | {"groups": []}, {name: whole[name] for name in whole if name != "kept"}):
        (tmp_path / "batch.json").write_text(json.dumps(other))
        with pytest.raises(StageFailed, match=r"batch\.json holds rollouts as another version of nanodag wrote them"):
            batches.read_batch(tmp_path / "batch.json")
