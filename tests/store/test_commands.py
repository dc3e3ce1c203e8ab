"""The commands that look after the store, as a user calls them."""

import json
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nanodag.cli import main
from nanodag.config.stage_base import StageBase
from nanodag.run.build_stage import made_from as made_from_artifact
from nanodag.store import Store
from tests.run_records import built, run_record, stage_record
from tests.store.making import product_in, publish

A, B, C = "a1" + "0" * 38, "a2" + "0" * 38, "b0" + "0" * 38


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("NANODAG_STORE", str(tmp_path / "s"))
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path / "s")


@pytest.fixture
def model(tmp_path):
    folder = product_in(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def nanodag(capsys, monkeypatch):
    """Exit code and output of the command."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["nanodag", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out + said.err

    return call


def made_from(artifact, label="model"):
    up = {"stage": artifact.stage, "kind": artifact.kind, "key": artifact.key}
    return {label: {**up, "attempt": artifact.attempt, "digest": artifact.digest}}


def write_run(store, name, stages, **pipeline):
    entries = {stage: built(artifact) for stage, artifact in stages.items()}
    store.write_run(run_record(name, stages=entries, pipeline={"stages": {}, **pipeline}))


@pytest.fixture
def chain(store, model):
    base = publish(store, model, A, stage="pretrain", kind="pretrain", metrics={"loss": 2.0}, sources={"file:x": "1"})
    tuned = publish(store, model, C, lineage=made_from(base), metrics={"loss": 1.5}, sources={"file:y": "1"})
    write_run(store, "first", {"pretrain": base, "sft": tuned}, seed=1)
    return base, tuned


def damage(store, artifact):
    path = store.local / artifact.folder / "files" / "weights"
    path.chmod(0o644)
    path.write_bytes(b"abcdefgX")


def test_verify_names_what_is_damaged_and_sets_it_aside(store, chain, nanodag):
    code, said = nanodag("verify")
    assert code == 0 and "2 whole" in said and "0 damaged" in said
    damage(store, chain[1])
    code, said = nanodag("verify", "first")
    assert code == 1 and "weights" in said and "differ from their recorded sha256" in said and "--set-aside" in said
    assert nanodag("verify", "a1")[0] == 0
    assert nanodag("verify", "b", "--set-aside")[0] == 1
    assert store.lookup(C) is None and store.lookup(A) == chain[0]
    assert [p.name[:41] for p in (store.local / "damaged").iterdir()] == [f"{C}-"]
    code, said = nanodag("verify", "first")
    assert code == 1 and "it is not in the store" in said
    assert nanodag("verify")[0] == 0


def test_gc_says_what_would_go_and_removes_it_only_when_told(store, chain, model, nanodag):
    useless = publish(store, model, B)
    code, said = nanodag("gc")
    assert code == 0 and B in said and "no run refers to it" in said and "Nothing was removed" in said
    assert store.lookup(B) == useless
    code, said = nanodag("gc", "--yes")
    assert code == 0 and "11 bytes freed" in said
    assert store.lookup(B) is None and store.lookup(A) and store.lookup(C)
    assert "Nothing can go" in nanodag("gc")[1]
    code, said = nanodag("gc", "--keep-best", "accuracy")
    assert code == 2 and "STAGE.METRIC" in said


def test_lineage_goes_up_to_the_data_and_is_drawn(store, chain, nanodag, tmp_path):
    code, said = nanodag("lineage", "b0", "--picture", "l.svg")
    lines = said.splitlines()
    assert code == 0 and lines[0].startswith(f"sft (sft)  {C[:12]}/0001")
    assert lines[1].startswith(f"├── model: pretrain (pretrain)  {A[:12]}/0001")
    assert "data file:x" in lines[2] and "data file:y" in lines[3]
    picture = ElementTree.parse(tmp_path / "l.svg")
    words = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "pretrain" in words and "sft" in words
    shutil.rmtree(store.local / "artifacts" / A)
    code, said = nanodag("lineage", "first:sft")
    assert code == 0 and "not in the store any more" in said
    assert nanodag("lineage", "first:sft", "--picture", "l.png")[0] == 1


def test_diff_shows_what_is_not_the_same(store, chain, model, nanodag):
    other = publish(store, model, B, lineage=made_from(chain[0]), metrics={"loss": 1.25}, sources={"file:y": "2"})
    write_run(store, "second", {"pretrain": chain[0], "sft": other}, seed=2)
    code, said = nanodag("diff", "first", "second")
    rows = [line.split() for line in said.splitlines()]
    assert code == 0
    assert ["sft", f"{C[:12]}/0001", f"{B[:12]}/0001"] in rows
    assert ["seed", "1", "2"] in rows
    assert ["sft:", "file:y", '"1"', '"2"'] in rows
    assert ["sft.loss", "1.5", "1.25", "-0.25"] in rows
    assert not any(row[:1] == ["pretrain.loss"] for row in rows)
    assert "\n  pretrain.loss " in nanodag("diff", "first", "second", "--all")[1]
    assert nanodag("diff", "first", "third")[0] == 1


def test_export_writes_a_plain_folder_and_overwrites_nothing(store, chain, model, nanodag, tmp_path):
    assert nanodag("export", "b0", "out")[0] == 0
    assert (tmp_path / "out" / "weights").read_bytes() == b"abcdefgh" and (tmp_path / "out" / "sub" / "more").is_file()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "sub", "weights"]
    (tmp_path / "out" / "weights").write_bytes(b"mine")
    code, said = nanodag("export", "a1", "out")
    assert code == 1 and "nothing is overwritten" in said
    assert (tmp_path / "out" / "weights").read_bytes() == b"mine"
    damage(store, chain[1])
    code, said = nanodag("export", "b0", "other")
    assert code == 1 and "differ from their recorded sha256" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "s"], "no half of a folder is left"
    (model / "config.json").unlink()
    publish(store, model, B, kind="eval")
    assert "no model and no tokenizer" in nanodag("export", "a2", "third")[1]


def test_a_key_may_be_abbreviated_as_long_as_one_begins_so(store, chain, model, nanodag):
    publish(store, model, B)
    for command, said in (
        ("lineage a", "2 keys in"),
        ("verify a", "2 keys begin so"),
        ("verify zz", "0 keys begin so"),
    ):
        code, output = nanodag(*command.split())
        assert code == 1 and said in output
    second = publish(store, model, C)
    assert f"{C[:12]}/0002" in nanodag("lineage", "b")[1] and second.attempt == "0002"
    assert f"{C[:12]}/0001" in nanodag("lineage", "b/0001")[1]
    assert json.loads((Path(store.local) / second.folder / "manifest.json").read_text())["attempt"] == "0002"


def test_status_and_gc_count_the_same_bytes_those_of_records_too(store, model, tmp_path, nanodag):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "metrics.jsonl").write_text("x" * 5000)
    artifact = publish(store, model, A, records=tmp_path / "records")
    made = made_from_artifact(artifact, StageBase(kind="sft"), {})
    entry = stage_record(state="built", key=A, made=made.model_dump())
    store.write_run(run_record("first", stages={"sft": entry}))
    assert "1 artifact, 5.0 kB" in nanodag("gc")[1]
    assert "the runs use 1 artifact, 5.0 kB" in nanodag("status")[1]


def test_status_and_stages_show_a_run_whose_artifact_is_gone(store, chain, nanodag):
    code, said = nanodag("status")
    assert code == 0 and "the runs use 2 artifacts" in said
    assert any(line.split()[:4] == ["sft", "sft", "built", C[:12]] for line in said.splitlines())
    shutil.rmtree(store.local / "artifacts" / A)
    code, said = nanodag("stages", "first")
    assert code == 0 and "There is no attempt 0001 of key a1" in said and "metric   loss = 1.5" in said


def test_a_record_of_another_format_is_named_by_the_commands_and_gc_removes_nothing(store, chain, model, nanodag):
    publish(store, model, B)
    path = store.local / "runs" / "first.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 7'))
    for command in (("stages", "first"), ("gc", "--yes"), ("verify",)):
        code, said = nanodag(*command)
        assert code == 1 and "runs/first.json" in said and "has format 7; this nanodag reads format 2" in said, command
    assert store.lookup(B) and store.lookup(C)
