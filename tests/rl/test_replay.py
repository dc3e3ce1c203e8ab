"""Groups of earlier steps that are trained again (`rollout.replay`)."""

from dataclasses import replace

from nanodag.rl.control.replay import ReplayBuffer, replay_metrics
from nanodag.rl.rollouts.batch import RolloutBatch
from nanodag.rl.rollouts.prompts import Prompt
from nanodag.rl.rollouts.rollout import REPLAYED, groups_of, read_rollouts
from tests.rl.fakes import config
from tests.rl.rollouts import rollout
from tests.rl.stages import make_job, metrics, run

VALUES = {"prompts_per_step": 4, "replay": {"share": 0.5, "max_staleness": 3}, "correction": "tis", "num_steps": 8}


def batch(step: int, *versions: int) -> RolloutBatch:
    """The fresh groups of a step, of two samples: the last one's tokens are of these versions, the others' current."""
    kept = []
    for number in range(2):
        prompt = Prompt(epoch=0, record={"prompt_id": f"{step}-{number}"}, token_ids=(1,))
        name = {"prompt_id": prompt.prompt_id, "logprob": -1.0}
        group = []
        for index, own in enumerate(((step - 1,), versions or (step - 1,))):
            ids = [5] * len(own)
            group.append(rollout(prompt.group_id, index, [1], ids, reward=float(index), versions=own, **name))
        kept.append((prompt, group))
    return RolloutBatch(kept=kept)


def replayed(mixed: RolloutBatch) -> list[str]:
    return [prompt.prompt_id for prompt, group in mixed.kept if REPLAYED in group[0].metadata]


def test_a_step_draws_its_share_from_groups_that_are_fresh_enough_by_seed_and_step_alone(tmp_path):
    buffer = ReplayBuffer(config(**VALUES))
    versions, drawn = [0], []
    for step in range(1, 9):
        mixed = buffer.with_replayed(step, batch(step), versions)
        fresh = [prompt.prompt_id.startswith(f"{step}-") for prompt, _ in mixed.kept]
        assert fresh == ([True, False, True, False] if step > 1 else [True, True])
        found = replay_metrics(mixed, versions)
        drawn.append(replayed(mixed))
        assert len(drawn[-1]) == len(set(drawn[-1])) == (2 if step > 1 else 0)
        if step > 1:
            assert found["replayed_groups"] == 2.0 and found["replayed_share"] == 0.5
            assert 1.0 <= found["replayed_staleness"] <= found["replayed_staleness_largest"] <= 3.0
        versions.append(step)
        buffer.keep(step, batch(step), versions)
        if step == 5:
            buffer.save(tmp_path)
            assert (tmp_path / "replay.jsonl").read_text().count("\n") == 6  # of steps 3, 4, 5
    again = ReplayBuffer(config(**VALUES))
    again.load(tmp_path)
    assert replayed(again.with_replayed(6, batch(6), [3, 4, 5])) == drawn[5]
    assert len(set(map(tuple, drawn[3:]))) > 2
    group = again.with_replayed(6, batch(6), [3, 4, 5]).kept[1][1]
    first = int(group[0].prompt_id[0])
    earlier = groups_of(batch(first).trained)[group[0].group_id]
    assert group == [replace(one, metadata={REPLAYED: first}) for one in earlier]


def test_a_group_is_as_old_as_its_oldest_trained_token(tmp_path):
    buffer = ReplayBuffer(config(**VALUES))
    buffer.keep(5, batch(5, 4, 2), [1, 2, 3, 4, 5])  # the oldest one was sampled 3 steps before
    assert len(replayed(buffer.with_replayed(6, batch(6), [1, 2, 3, 4, 5]))) == 2
    assert not replayed(buffer.with_replayed(7, batch(7), [1, 2, 3, 4, 5, 6]))
    buffer.keep(6, RolloutBatch(), [1, 2, 3, 4, 5, 6])
    buffer.save(tmp_path)
    assert (tmp_path / "replay.jsonl").read_text() == ""


def test_a_stage_replays_its_share_corrected_and_each_prompt_is_sampled_once(tmp_path):
    job = make_job(tmp_path, **{**VALUES, "num_steps": 4}, eval_prompts=0, micro_batch_tokens=128)
    run(job)
    steps = metrics(job)
    assert [line.get("replayed_share", 0.0) for line in steps] == [0.0, 0.5, 0.5, 0.5]
    assert all(line["rollouts"] == 8 and line["replayed_ratio"] != 1.0 for line in steps[1:])
    assert steps[3]["staleness_largest"] >= steps[3]["replayed_staleness"] >= 1.0
    ledger = (job.records / "ledger.jsonl").read_text().splitlines()
    assert len(ledger) == 8
    rollouts = list(read_rollouts(job.records / "rollouts" / "step-00000004.jsonl"))
    again = {one.metadata[REPLAYED] for one in rollouts if REPLAYED in one.metadata}
    assert len(rollouts) == 16 and again <= {1, 2, 3} and again
