"""Artifacts of adapters alone: whoever asks for their model gets it merged, once, and to the bit."""

import contextlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import nanodag as door  # `nanodag` is a fixture
from nanodag.cli.serve import found_model
from nanodag.errors import ArtifactNotFound, StoreError
from nanodag.model.adapter_folder import merge_onto
from nanodag.run.retention import check, free, plan
from nanodag.store import Store
from nanodag.store.manifest import BASE
from tests.model.adapters import leave_both
from tests.rl.models import save_tiny_model
from tests.run_records import built, run_record
from tests.store.making import key, made_from, publish

WEEK_S = 7 * 86400.0


def content(folder: Path) -> dict[str, bytes]:
    """Every file by its path, but the copy of the adapters that a merged stage leaves beside its model."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith("adapter/")}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a base, of the merged model, and of the adapters alone."""
    folder = tmp_path_factory.mktemp("adapters")
    base = save_tiny_model(folder / "base", vocabulary=64)
    return base, *leave_both(folder, base)


def change(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.fixture
def base(store, made):
    return publish(store, made[0], key("b"), stage="base", kind="import")


@pytest.fixture
def tuned(store, made, base):
    return publish(store, made[2], key("c"), lineage=made_from(base))


@pytest.fixture
def seen(monkeypatch):
    """The folders that are merged from now on; by this process, as another one takes seconds to import torch."""
    seen: list[str] = []

    def run(command, **options):
        seen.append(command[-1])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            merge_onto(*map(Path, command[3:]))
        return subprocess.CompletedProcess(command, 0, said.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_the_model_of_adapters_is_to_the_bit_what_a_merged_stage_leaves_and_is_merged_once(
    store, made, tuned, seen, caplog
):
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(store.materialize(tuned))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [str(folder) for folder in set(folders)] and len(folders) == 3
    assert content(folders[0]) == content(made[1]) and not [r for r in caplog.records if r.levelno > logging.INFO]


@pytest.mark.parametrize("scores", [False, True], ids=["model", "reward model"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_over_the_model_of_adapters_are_merged_to_the_bit_too(
    store, base, tuned, tmp_path, seen, scores, dtype
):
    merged, alone = leave_both(tmp_path, store.materialize(tuned), dtype=dtype, scores=scores, seed=2)
    again = publish(store, alone, key("d"), lineage=made_from(tuned))
    shutil.rmtree(store.local / "cache")
    assert content(store.materialize(again)) == content(merged)


@pytest.mark.parametrize("half", ["no digests", "half of a file", "another folder's digests", "a temporary folder"])
def test_what_a_kill_leaves_or_a_disk_damages_is_merged_again(store, made, tuned, seen, half):
    folder = store.materialize(tuned)
    whole, weights, sums = content(folder), folder / "model.safetensors", folder.with_suffix(".json")
    match half:
        case "no digests":
            sums.unlink()
            change(weights, b"x")
        case "half of a file":
            change(weights, whole["model.safetensors"][:-9])
        case "another folder's digests":
            sums.write_text("{}")
        case "a temporary folder":
            folder.rename(folder.with_name("merged.tmp"))
    assert store.materialize(tuned) == folder and content(folder) == whole == content(made[1])
    assert sorted(os.listdir(folder.parent)) == ["merged", "merged.json"]


ASKS = "from nanodag.store import Store; s = Store({!r}); print(s.materialize(s.get({!r})))"


@pytest.mark.slow
def test_two_processes_ask_at_once_one_is_killed_while_it_merges_and_the_other_gets_the_model(store, made, tuned):
    command = [sys.executable, "-c", ASKS.format(store.url, tuned.key)]
    first, children = subprocess.Popen(command), []
    while not children:
        assert first.poll() is None
        children = psutil.Process(first.pid).children()
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first.kill()
    assert first.wait() and children[0].is_running()  # it has the lock on
    said, _ = other.communicate(timeout=300)
    assert other.returncode == 0 and content(Path(said.strip())) == content(made[1])
    assert sorted(os.listdir(Path(said.strip()).parent)) == ["merged", "merged.json"]


def test_a_base_that_is_gone_or_has_other_content_is_refused_by_name(store, made, base, tuned, seen, tmp_path):
    shutil.rmtree(store.local / base.folder)
    words = f"The input base of {tuned.folder} .key {base.key[:12]}, content {base.digest[:12]}. is not in .* any more"
    with pytest.raises(ArtifactNotFound, match=words):
        store.materialize(tuned)
    other = save_tiny_model(tmp_path / "other", vocabulary=64, seed=5)
    publish(store, other, base.key, stage="base", kind="import")
    with pytest.raises(ArtifactNotFound, match=words):
        store.materialize(tuned)
    publish(store, made[0], base.key, stage="base", kind="import")  # another attempt of the same content will do
    assert content(store.materialize(tuned)) == content(made[1])


def test_what_cannot_be_merged_is_said_with_its_reason_and_leaves_nothing_that_counts(store, made, tmp_path):
    other = publish(store, save_tiny_model(tmp_path / "o", vocabulary=64, num_layers=1), key("e"), stage="base")
    shutil.copytree(made[2], tmp_path / "alone")
    (tmp_path / "alone" / "adapter_model.safetensors").write_bytes(b"x" * 9)
    odd = publish(store, tmp_path / "alone", key("f"), lineage=made_from(other))
    with pytest.raises(StoreError, match=f"adapters of {odd.folder} were not merged.*header too large"):
        store.materialize(odd)
    assert not (store.local / "cache" / odd.key / odd.attempt / "merged.json").exists()


def test_weights_that_another_machine_multiplied_are_taken_with_a_warning(store, base, made, seen, tmp_path, caplog):
    shutil.copytree(made[2], tmp_path / "alone")
    facts = json.loads((tmp_path / "alone" / BASE).read_text())
    (tmp_path / "alone" / BASE).write_text(json.dumps({**facts, "merged": "0" * 16}))
    store.materialize(publish(store, tmp_path / "alone", key("e"), lineage=made_from(base)))
    assert "differ from those of its training in their last bits" in caplog.text


def test_gc_keeps_a_base_while_its_adapters_are_kept_and_lets_a_merged_model_go(store, base, tuned, seen):
    store.write_run(run_record("r", stages={"sft": built(tuned)}))
    folder = store.materialize(tuned)
    assert plan(store).items == ()
    long_ago = time.time() - WEEK_S - 60
    os.utime(folder.parent, (long_ago, long_ago))
    store.materialize(tuned)
    assert plan(store).items == ()  # it has been asked for
    os.utime(folder.parent, (long_ago, long_ago))
    (item,) = plan(store).items
    assert item.what == "merged" and item.num_bytes > 1000
    assert free(store, plan(store), settle_s=0) == (item.num_bytes, []) and not folder.exists()
    whole = content(store.materialize(tuned))
    store.remove_run("r")
    free(store, plan(store), settle_s=0)
    assert whole and store.keys() == [] and not folder.exists()


def test_gc_keeps_the_whole_attempt_of_a_base_whose_own_attempt_is_damaged(store, made, base, tuned, seen):
    store.write_run(run_record("r", stages={"sft": built(tuned)}))
    change(store.local / base.folder / "files" / "model.safetensors", b"cut")
    again = publish(store, made[0], base.key, stage="base", kind="import")
    publish(store, made[1], base.key, stage="base", kind="import")  # of other content, and of no use
    found = plan(store)
    assert again.attempt != base.attempt and f"/{again.attempt}" not in {item.name[-5:] for item in found.items}
    free(store, found, settle_s=0)
    assert content(store.materialize(tuned)) == content(made[1])


def test_verify_looks_at_the_adapters_and_merges_nothing(store, tuned, seen):
    assert check(store, tuned.key, tuned.attempt).state == "whole" and seen == []


def test_a_remote_store_keeps_the_adapters_alone(made, tmp_path, seen):
    remote = Store("memory://adapters", local=tmp_path / "local")
    base = publish(remote, made[0], key("b"), stage="base")
    tuned = publish(remote, made[2], key("c"), lineage=made_from(base))
    assert content(remote.materialize(tuned)) == content(made[1])
    assert not [name for name in remote.backend.listing(tuned.folder) if "model-" in name or "/model." in name]


def test_chat_export_and_programs_get_the_merged_model_by_a_process_of_its_own(
    store, made, tuned, tmp_path, nanodag, monkeypatch
):
    monkeypatch.setenv("NANODAG_STORE", store.url)
    monkeypatch.chdir(tmp_path)
    store.write_run(run_record("r", state="completed", stages={"sft": built(tuned)}))
    assert content(found_model("r", "sft", "")[1]) == content(made[1])
    apart = found_model("r", "sft", "", apart=True)
    assert (apart.adapter / "adapter_config.json").is_file() and not (apart.folder / "adapter_config.json").exists()
    nanodag(f"export r:sft {tmp_path / 'exported'}")
    assert content(tmp_path / "exported") == content(made[1])
    view = door.open_store().run("r")["sft"]
    assert content(view.path) == content(made[1])
    model, _ = view.load_model()
    assert torch.equal(model.lm_head.weight, door.open_store().run("r")["sft"].load_model()[0].lm_head.weight)


def test_adapters_trained_on_other_positions_than_the_base_declares_are_served_merged(store, tuned, made):
    assert store.apart(tuned)[1] is not None
    folder = store.verified(tuned, "files")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    store.verified = lambda artifact, part: folder
    store.materialize = lambda artifact: folder if artifact.key == tuned.key else made[0]
    assert store.apart(tuned) == (folder, None)
