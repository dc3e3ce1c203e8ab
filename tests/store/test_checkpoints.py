"""Checkpoints: the newest whole one counts."""

from pathlib import Path

import pytest

from nanodag.errors import CorruptArtifact
from nanodag.store import Checkpoints
from nanodag.store.checkpoints import verify_checkpoint
from tests.store.making import save


def test_the_newest_of_those_kept_counts(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest_valid() is None
    for step in (10, 20, 30):
        save(checkpoints, step)
    step, folder = checkpoints.newest_valid()
    assert (step, (folder / "rank-0" / "state").read_bytes()) == (30, b"weights")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_a_half_written_one_is_ignored_and_cleared_away(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 10)
    (checkpoints.begin(20) / "state").write_bytes(b"half")
    assert checkpoints.newest_valid()[0] == 10
    checkpoints.begin(20)
    assert list(checkpoints.temporary(20).iterdir()) == []


@pytest.mark.parametrize("name", ["rank-0/state", "checkpoint.json"])
@pytest.mark.parametrize("damage", [None, lambda old: old[:-4], lambda old: old[:-1] + b"X"])
def test_a_missing_a_short_and_a_changed_file_are_found_and_the_checkpoint_before_counts(tmp_path, name, damage):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 10)
    path = save(checkpoints, 20) / name
    content = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(content))
    with pytest.raises(CorruptArtifact):
        verify_checkpoint(path.parents[len(Path(name).parts) - 1])
    assert checkpoints.newest_valid()[0] == 10


def test_a_step_can_be_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 10)
    save(checkpoints, 10, "again")
    assert (checkpoints.newest_valid()[1] / "rank-0" / "state").read_bytes() == b"again"
