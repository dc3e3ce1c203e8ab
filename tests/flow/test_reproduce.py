"""A stage built again from what its artifact recorded."""

import os
import shutil
import threading

import pytest

from nanodag.errors import ArtifactNotFound, StageStopped, StoreError
from nanodag.run.build_stage import build_stage
from nanodag.run.reproduce import reproduce
from nanodag.run.retention import free, plan
from nanodag.worker.devices import devices_folder, devices_for, hold
from tests.fake_stages import FAKES


@pytest.fixture
def made(run):
    """The artifacts of the first two stages."""
    tokenizer = build_stage(run, "tokenizer", {})
    base = build_stage(run, "pretrain", {"tokenizer": tokenizer})
    return [run.store.attempt(r.key, r.attempt) for r in (tokenizer, base)]


def test_the_same_recipe_gives_the_same_bytes_and_leaves_nothing(run, made):
    found = reproduce(run.store, made[1], file="")
    assert found.is_same and found.digest == made[1].digest and found.workspace is None
    assert set(found.files.values()) == {"same"}
    assert not list((run.store.local / "work").iterdir())
    assert run.store.attempts(made[1].key) == ["0001"]


def test_other_bytes_are_named_and_kept_to_be_looked_at(run, made, project, monkeypatch):
    before = project / "before"  # a worker that makes something else, found before the usual fake one
    before.mkdir()
    code = (FAKES / "fake_worker.py").read_text()
    (before / "fake_worker.py").write_text(code.replace('f"# {job.name}\\n"', '"# other\\n"'))
    monkeypatch.setenv("PYTHONPATH", f"{before}:{FAKES}")
    found = reproduce(run.store, made[1], file="")
    assert not found.is_same and found.files == {"made.json": "same", "report.md": "differs"}
    assert (found.workspace / "output" / "report.md").read_text() == "# other\n"


def test_meanwhile_its_folder_is_not_cleared_away_and_it_holds_a_device(run, made):
    seen = []

    def look(line):
        if not seen:
            _, stayed = free(run.store, plan(run.store))
            devices = devices_for(device="cpu", num_gpus=0, is_beside=False)
            stop = threading.Event()
            stop.set()
            with pytest.raises(StageStopped), hold(devices_folder(run.store), devices, stop=stop):
                raise AssertionError("two stages train at once")
            seen.extend(stayed)

    assert reproduce(run.store, made[1], file="", on_line=look).is_same
    assert len(seen) == 1 and "work/reproduce-" in seen[0] and "somebody is building" in seen[0]


def test_what_another_user_wrote_or_other_data_made_is_not_run(run, made, project, monkeypatch):
    (project / "text.txt").write_text("other\n" * 100)
    with pytest.raises(StoreError, match=r"data .*text\.txt are not what artifact"):
        reproduce(run.store, made[1], file="")
    (project / "text.txt").write_text("hello\n" * 100)
    if os.geteuid() == 0:
        os.chown(run.store.local / made[1].folder / "manifest.json", 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreError, match="written by another user"):
        reproduce(run.store, made[1], file="")
    assert not list((run.store.local / "work").iterdir())


def test_a_missing_input_is_named_and_another_attempt_with_its_content_will_do(run, made):
    tokenizer = made[0]
    build_stage(run, "tokenizer", {}, force=True)
    shutil.rmtree(run.store.local / tokenizer.folder)
    assert reproduce(run.store, made[1], file="").is_same
    shutil.rmtree(run.store.local / "artifacts" / tokenizer.key)
    with pytest.raises(ArtifactNotFound, match="The input tokenizer"):
        reproduce(run.store, made[1], file="")
