"""A saved state that is not whole, or whose ranks disagree, is refused by name."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from nanodag.errors import ConfigError, CorruptArtifact
from nanodag.store.checkpoints import Checkpoints
from nanodag.train.checkpoint import (
    Progress,
    key,
    load_checkpoint,
    newest_of_all,
    save_checkpoint,
    saved_state,
    write_state,
)
from nanodag.train.optimizer import Segment

SHAPES = {"a": (4,)}


def piece(offset, length):
    return Segment(name="a", shape=(4,), flat=0, start=0, offset=offset, length=length)


def save_two_ranks(folder, *, num_updates=(16, 16)):
    """A parameter of 0 to 3, a half on each rank."""
    for rank, updates in enumerate(num_updates):
        half = torch.arange(4.0)[2 * rank : 2 * rank + 2]
        common = dict(num_updates=updates, num_files=2, shapes=SHAPES)
        write_state(folder, rank, common, {key("weights", piece(2 * rank, 2)): half})


def load(folder, shapes=SHAPES):
    with saved_state(folder, shapes) as saved:
        whole = torch.zeros(4)
        saved.fill("weights", piece(0, 4), whole)
        return saved.num_updates, whole.tolist()


def test_pieces_of_two_ranks_come_together_and_the_count_is_what_they_have_in_common(tmp_path):
    save_two_ranks(tmp_path)
    assert load(tmp_path) == (16, [0.0, 1.0, 2.0, 3.0])


def test_ranks_that_disagree_or_are_missing_a_missing_count_and_another_model_are_refused_by_name(tmp_path):
    save_two_ranks(tmp_path, num_updates=(0, 16))
    with pytest.raises(CorruptArtifact, match=r"-00001-of-00002\.safetensors says num_updates 16, state\.json says 0"):
        load(tmp_path)
    with pytest.raises(CorruptArtifact, match=r"1 parameter; a has the shape \(4,\) there, \(2, 2\) here"):
        load(tmp_path, {"a": (2, 2)})
    (tmp_path / "state-00001-of-00002.safetensors").unlink()
    with pytest.raises(CorruptArtifact, match=r"lacks state-00001-of-00002\.safetensors"):
        load(tmp_path)
    (tmp_path / "state.json").unlink()
    with pytest.raises(CorruptArtifact, match=r"holds no state\.json"):
        load(tmp_path)


def engine_of(world_size=1, steps=None):
    """One rank of so many, whose weights nobody asks for. steps: what the ranks are said to have found."""
    return SimpleNamespace(
        rank=0,
        world_size=world_size,
        gathered=lambda value: steps or [value] * world_size,
        save=lambda folder, *, snapshot: (folder / "state.json").write_text("{}"),
        load=lambda folder: None,
        barrier=lambda: None,
    )


CURSOR = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)


def saved_at_step_3(tmp_path, **changes):
    checkpoints = Checkpoints(tmp_path)
    progress = Progress(step=3, seconds=9.0, validation_loss=0.1, last_losses=[0.3], **changes)
    save_checkpoint(checkpoints, engine_of(), progress, CURSOR, num_steps=5, best=None)
    return checkpoints, tmp_path / "step-00000003", progress


def test_what_is_common_comes_back_whole_the_last_validation_among_it(tmp_path):
    checkpoints, folder, progress = saved_at_step_3(tmp_path, best_loss=0.05, best_step=1, evals_since_best=2)
    assert newest_of_all(checkpoints, engine_of()) == folder
    drawn = [random.random(), torch.rand(()).item()]
    found, best = load_checkpoint(folder, engine_of(), CURSOR)
    assert (found, best) == (progress, None)
    assert [random.random(), torch.rand(()).item()] == drawn


def test_a_rank_that_knows_another_step_is_refused_by_name(tmp_path):
    _, folder, _ = saved_at_step_3(tmp_path)
    path = folder / "rank-00000.json"
    own = json.loads(path.read_text())
    own["common"]["progress"]["step"] = 2
    path.write_text(json.dumps(own))
    with pytest.raises(CorruptArtifact, match=r"rank-00000\.json says progress .*'step': 2"):
        load_checkpoint(folder, engine_of(), CURSOR)


def test_ranks_that_find_different_checkpoints_are_refused_by_name(tmp_path):
    checkpoints, _, _ = saved_at_step_3(tmp_path)
    with pytest.raises(CorruptArtifact, match=r"rank by rank: \[3, -1\]"):
        newest_of_all(checkpoints, engine_of(world_size=2, steps=[3, -1]))


def test_another_number_of_ranks_is_refused_before_any_data_is_read(tmp_path):
    checkpoints, _, _ = saved_at_step_3(tmp_path)
    with pytest.raises(ConfigError, match=r"written by 1 rank; this stage runs on 2\. Set resources.num_ranks to 1"):
        newest_of_all(checkpoints, engine_of(world_size=2))
