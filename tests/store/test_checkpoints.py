"""Checkpoints: the newest whole one counts."""

import logging

import pytest

from nanodag.errors import CorruptArtifact
from nanodag.store import Checkpoints
from nanodag.store.checkpoints import verify_checkpoint


def save(checkpoints, step, content=b"weights"):
    folder = checkpoints.begin(step)
    (folder / "rank-0").mkdir()
    (folder / "rank-0" / "state").write_bytes(content)
    return checkpoints.commit(step)


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


def test_a_flipped_byte_is_named_and_the_one_before_is_taken(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 10)
    newest = save(checkpoints, 20)
    (newest / "rank-0" / "state").write_bytes(b"weightX")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest_valid()[0] == 10
    assert "rank-0/state differs from its recorded sha256" in caplog.text


@pytest.mark.parametrize("damage", ["missing file", "short file", "no manifest", "manifest cut"])
def test_damage_is_found(tmp_path, damage):
    folder = save(Checkpoints(tmp_path), 10)
    state, manifest = folder / "rank-0" / "state", folder / "checkpoint.json"
    if damage == "missing file":
        state.unlink()
    elif damage == "short file":
        state.write_bytes(b"wei")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:20])
    with pytest.raises(CorruptArtifact):
        verify_checkpoint(folder)


def test_a_step_can_be_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 10)
    save(checkpoints, 10, b"again")
    assert (checkpoints.newest_valid()[1] / "rank-0" / "state").read_bytes() == b"again"
