"""The commands that look after the store, as a user calls them."""

import shutil
from xml.etree import ElementTree

import httpx2
import pytest

from nanodag.config.stage_base import StageBase
from nanodag.run.build_stage import made_from as made_from_artifact
from nanodag.store import Store
from tests.run_records import built, run_record, stage_record
from tests.store.making import made_from, product_in, publish

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
    nanodag("verify", "2 whole", "0 damaged")
    damage(store, chain[1])
    nanodag("verify first", "weights", "differ from their recorded sha256", "--set-aside", code=1)
    nanodag("verify a1")
    nanodag("verify b --set-aside", code=1)
    assert store.lookup(C) is None and store.lookup(A) == chain[0]
    assert [p.name[:41] for p in (store.local / "damaged").iterdir()] == [f"{C}-"]
    nanodag("verify first", "it is not in the store", code=1)
    nanodag("verify")


def test_gc_says_what_would_go_and_removes_it_only_when_told(store, chain, model, nanodag):
    useless = publish(store, model, B)
    nanodag("gc", B, "no run refers to it", "Nothing was removed")
    assert store.lookup(B) == useless
    nanodag("gc --yes", "11 bytes freed")
    assert store.lookup(B) is None and store.lookup(A) and store.lookup(C)
    nanodag("gc", "Nothing can go")
    nanodag("gc --keep-best accuracy", "STAGE.METRIC", code=2)


def test_lineage_goes_up_to_the_data_and_is_drawn(store, chain, nanodag, tmp_path):
    lines = nanodag("lineage b0 --picture l.svg").splitlines()
    assert lines[0].startswith(f"sft (sft)  {C[:12]}/0001")
    assert lines[1].startswith(f"├── model: pretrain (pretrain)  {A[:12]}/0001")
    assert "data file:x" in lines[2] and "data file:y" in lines[3]
    picture = ElementTree.parse(tmp_path / "l.svg")
    words = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "pretrain" in words and "sft" in words
    shutil.rmtree(store.local / "artifacts" / A)
    nanodag("lineage first:sft", "not in the store any more")
    nanodag("lineage first:sft --picture l.png", code=1)


def test_diff_shows_what_is_not_the_same(store, chain, model, nanodag):
    other = publish(store, model, B, lineage=made_from(chain[0]), metrics={"loss": 1.25}, sources={"file:y": "2"})
    write_run(store, "second", {"pretrain": chain[0], "sft": other}, seed=2)
    rows = [line.split() for line in nanodag("diff first second").splitlines()]
    assert ["sft", f"{C[:12]}/0001", f"{B[:12]}/0001"] in rows
    assert ["seed", "1", "2"] in rows
    assert ["sft:", "file:y", '"1"', '"2"'] in rows
    assert ["sft.loss", "1.5", "1.25", "-0.25"] in rows
    assert not any(row[:1] == ["pretrain.loss"] for row in rows)
    nanodag("diff first second --all", "\npretrain.loss ")
    nanodag("diff first third", code=1)


def test_export_writes_a_plain_folder_and_overwrites_nothing(store, chain, model, nanodag, tmp_path):
    out = tmp_path / "out"
    nanodag("export b0 out")
    assert (out / "weights").read_bytes() == b"abcdefgh" and (out / "sub" / "more").is_file()
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "sub", "weights"]
    (out / "weights").write_bytes(b"mine")
    nanodag("export a1 out", "nothing is overwritten", code=1)
    assert (out / "weights").read_bytes() == b"mine"
    damage(store, chain[1])
    nanodag("export b0 other", "differ from their recorded sha256", code=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "s"], "no half of a folder is left"
    (model / "config.json").unlink()
    publish(store, model, B, kind="eval")
    nanodag("export a2 third", "no model and no tokenizer", code=1)


def test_a_key_may_be_abbreviated_as_long_as_one_begins_so(store, chain, model, nanodag):
    publish(store, model, B)
    nanodag("lineage a", "2 keys in", code=1)
    nanodag("verify a", "2 keys in", code=1)
    nanodag("verify zz", "0 keys in", code=1)
    assert publish(store, model, C).attempt == "0002"
    nanodag("lineage b", f"{C[:12]}/0002")
    nanodag("lineage b/0001", f"{C[:12]}/0001")


def test_status_and_gc_count_the_same_bytes_those_of_records_too(store, model, tmp_path, nanodag):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "metrics.jsonl").write_text("x" * 5000)
    artifact = publish(store, model, A, records=tmp_path / "records")
    made = made_from_artifact(artifact, StageBase(kind="sft"), {})
    entry = stage_record(state="built", key=A, made=made.model_dump())
    store.write_run(run_record("first", stages={"sft": entry}))
    nanodag("gc", "1 artifact, 5.0 kB")
    nanodag("status", "the runs use 1 artifact, 5.0 kB")


def test_status_and_stages_show_a_run_whose_artifact_is_gone(store, chain, nanodag):
    said = nanodag("status", "the runs use 2 artifacts")
    assert any(line.split()[:4] == ["sft", "sft", "built", C[:12]] for line in said.splitlines())
    shutil.rmtree(store.local / "artifacts" / A)
    nanodag("stages first", "There is no attempt 0001 of key a1", "metric   loss = 1.5")


def test_a_record_of_another_format_is_named_by_the_commands_and_gc_removes_nothing(store, chain, model, nanodag):
    publish(store, model, B)
    path = store.local / "runs" / "first.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 7'))
    for command in ("stages first", "gc --yes", "verify"):
        nanodag(command, "runs/first.json", "has format 7; this nanodag reads format 2", code=1)
    assert store.lookup(B) and store.lookup(C)


def test_push_sends_a_verified_folder_with_its_card(store, chain, nanodag, monkeypatch):
    sent = {}

    class Hub:
        def create_repo(self, name, **options):
            sent.update(options, repo=name)

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            sent.update(files=sorted(path.name for path in folder_path.iterdir()), message=commit_message)
            sent["card"] = (folder_path / "README.md").read_text()
            return "https://hub/commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    nanodag("push b0 me/tuned --card", "# me/tuned", "pretrain", "file:y")
    assert not sent, "a card alone is sent nowhere"
    nanodag("push b0 me/tuned --private", "https://hub/commit")
    assert (sent["repo"], sent["private"]) == ("me/tuned", True)
    assert sent["files"] == ["README.md", "config.json", "sub", "weights"]
    assert "license: other" in sent["card"] and "library_name: transformers" in sent["card"]
    damage(store, chain[1])
    nanodag("push b0 me/tuned", "differ from their recorded sha256", code=1)


def test_a_card_names_data_and_neither_servers_nor_folders_nor_what_signs_one_in(store, model, nanodag):
    sources = {
        "hub:me/chats:train": {"kind": "hub"},
        "https://me:secret@host/data.jsonl?key=secret": {"kind": "shards", "urls": ["https://me:secret@host"]},
        "file:/home/me/own.jsonl": {"kind": "file"},
        "hub:me/base@main": {"kind": "model", "name": "me/base"},
        "http://10.0.0.5:3000": {"kind": "server", "model": "/home/me/models/x"},
        "process:/home/me/my.py:f": {"kind": "file"},
    }
    (model / "README.md").write_text("---\nlicense: [&a [x, x], [*a, *a]]\n---\n")  # of somebody else
    publish(store, model, A, kind="import", config={"model": "hub:me/base@main"}, sources=sources)
    card = nanodag("push a1 me/x --card")
    assert "license: other" in card
    assert "- me/chats\n" in card and "base_model:\n- me/base\n" in card
    assert "https://host/data.jsonl`" in card and "file:own.jsonl" in card
    for private in ("secret", "10.0.0.5", "/home/me", "process:"):
        assert private not in card


@pytest.mark.parametrize("error", [OSError, httpx2.ConnectError])
def test_push_says_what_the_hub_refuses(store, chain, nanodag, monkeypatch, error):
    def refuse(self, name, **options):
        raise error("401: not signed in")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    nanodag("push b0 me/tuned", "was not published", "401: not signed in", "hf auth login", code=1)
