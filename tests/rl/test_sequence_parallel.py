"""Rows that several ranks share. That a step comes out as on one rank is tested in test_split.py."""

import pytest
import torch

from benchmarks import long_rows
from nanodag.errors import ConfigError
from nanodag.model.folder import load
from nanodag.rl.trainer.policy import Policy
from nanodag.train.sequence_parallel import SequenceGroup
from tests.rl.models import save_tiny_model
from tests.rl.stages import make_job, metrics, on, run


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_the_parts_of_a_row_make_up_the_row_and_each_token_is_scored_once(size):
    token_ids, position_ids = torch.arange(100, 107), torch.arange(7)
    predictors, targets = torch.tensor([2, 6, 2, 0, 3]), torch.tensor([30, 31, 32, 33, 34])
    row = (token_ids, position_ids, predictors, targets)
    shares = [SequenceGroup(size=size, place=place).share_of(*row) for place in range(size)]
    tokens, positions = (torch.cat([getattr(s, name)[0] for s in shares]) for name in ("token_ids", "position_ids"))
    assert len({share.token_ids.shape for share in shares}) == 1
    assert tokens[:7].equal(token_ids) and positions[:7].equal(position_ids) and not tokens[7:].any()
    assert sorted(place for share in shares for place in share.places.tolist()) == [0, 1, 2, 3, 4]
    for share in shares:
        assert share.targets[0].equal(targets[share.places])
        assert share.token_ids[0, share.predictors].equal(token_ids[predictors[share.places]])


def test_a_model_whose_heads_cannot_be_shared_out_is_refused(tmp_path):
    model = save_tiny_model(tmp_path)  # 4 query heads, 2 key-value heads
    Policy(load(model), temperature=1.0, group=SequenceGroup(size=2))
    with pytest.raises(ConfigError, match=r"sequence_parallel 4 .* 4 query and 2 key-value heads"):
        Policy(load(model), temperature=1.0, group=SequenceGroup(size=4))


@pytest.mark.slow
def test_a_stage_of_ranks_that_share_rows_trains_as_one_rank_does(tmp_path):
    found = []
    for num_ranks in (1, 2):
        values = {**on(num_ranks), "sequence_parallel": num_ranks, "precision": "bf16"}
        job = make_job(tmp_path / str(num_ranks), **values)
        run(job)
        rollouts = (job.records / "rollouts" / "step-00000001.jsonl").read_text()
        scores = [path.read_text() for path in sorted((job.records / "rollouts").glob("step-00000001.scores-*.jsonl"))]
        assert [bool(of_rank) for of_rank in scores] == [True, False][:num_ranks]
        found.append((rollouts, metrics(job)[0]))
    (rollouts, alone), (others, shared) = found
    assert rollouts == others and alone["trained_tokens"] == shared["trained_tokens"] == 64
    for name in ("gradient_norm", "entropy", "ratio"):
        assert shared[name] == pytest.approx(alone[name], rel=0.03)


@pytest.mark.slow
def test_two_ranks_take_less_than_two_thirds_of_the_memory_of_one_for_two_responses_of_4096_tokens(tmp_path):
    long_rows.save_model(tmp_path, layers=6, width=256, vocabulary=8192)
    values = {"num_tokens": 4096, "num_responses": 2, "precision": "bf16"}
    found = [long_rows.measured(tmp_path, num_ranks=num_ranks, **values) for num_ranks in (1, 2)]
    alone, shared = (max(of_rank["peak"] - of_rank["before"] for of_rank in ranks) for ranks in found)
    assert shared < alone * 2 / 3
    assert found[1][0]["gradient_norm"] == pytest.approx(found[0][0]["gradient_norm"], rel=0.01)
