"""Which weights are a run's newest, and that engines get each new set."""

import asyncio
from pathlib import Path

import pytest

from nanodag.api import follow as module
from nanodag.api.follow import Followed, FollowedWeights, follow
from nanodag.errors import ArtifactNotFound, BadRequest, CorruptArtifact, SamplerError
from tests.run_records import built, run_record, stage_record

KEY = "ab" * 20
PROVENANCE = {"config": {}, "lineage": {}, "sources": {}, "metrics": {}, "cost": {}, "environment": {}}


def publish(store, tmp_path, stage, key):
    files = tmp_path / f"files-{stage}"
    files.mkdir()
    (files / "config.json").write_text(stage)
    return store.publish(key, files, kind=stage, stage=stage, **PROVENANCE)


def under_way(tmp_path, steps):
    """An RL stage with checkpoints of these steps, and one that is being written."""
    for step in steps:
        (tmp_path / "work" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "work" / "checkpoints" / "step-00000099.tmp").mkdir(parents=True, exist_ok=True)
    return stage_record("rl", state="running", key=KEY, workspace=str(tmp_path / "work"))


def followed(store, tmp_path, stage=""):
    return Followed(store, "run", stage, tmp_path / "scratch")


def test_the_newest_checkpoint_of_a_stage_under_way_comes_before_what_is_finished(store, tmp_path):
    sft = built(publish(store, tmp_path, "sft", "cd" * 20))
    store.write_run(run_record("run", state="running", stages={"sft": sft, "rl": under_way(tmp_path, [])}))
    newest = followed(store, tmp_path).newest()
    assert newest.version == "sft@cdcdcdcd/0001"
    assert (newest.fetch() / "config.json").read_text() == "sft"
    under_way(tmp_path, [5, 10])
    assert followed(store, tmp_path).newest().version == "rl@abababab:step-10"
    assert followed(store, tmp_path, "sft").newest().version == "sft@cdcdcdcd/0001"


def test_a_finished_stage_gives_its_artifact_whatever_checkpoints_lie_there(store, tmp_path):
    under_way(tmp_path, [5])
    rl = built(publish(store, tmp_path, "rl", KEY), workspace=str(tmp_path / "work"))
    store.write_run(run_record("run", stages={"rl": rl, "report": stage_record("report", state="running")}))
    assert followed(store, tmp_path).newest().version == "rl@abababab/0001"


def test_a_run_without_weights_is_said(store, tmp_path):
    store.write_run(run_record("run", state="running", stages={"rl": under_way(tmp_path, [])}))
    with pytest.raises(ArtifactNotFound, match="has no weights yet"):
        followed(store, tmp_path).first()


class Source:
    """What follow asks: the next of these each time, then the last for ever."""

    def __init__(self, *answers, faults=()):
        self.answers, self.faults, self.dropped = list(answers), list(faults), []

    def newest(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer and FollowedWeights(answer, lambda: self.fetched(answer))

    def fetched(self, answer):
        if self.faults:
            raise self.faults.pop()
        return Path("/scratch") / answer

    def drop(self, folder):
        self.dropped.append(folder.name)


class Engines:
    name = "run"

    def __init__(self):
        self.took = []

    async def take_weights(self, folder, version):
        if "other" in version:
            raise BadRequest("of another shape")
        assert folder.name == version
        self.took.append(version)


def taken(monkeypatch, source, last):
    """The versions that engines took from a source until they had the last."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    engines = Engines()

    async def main():
        task = asyncio.ensure_future(follow(source, engines, "1"))
        while last not in engines.took:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), 10))
    return engines.took


def test_engines_get_each_new_set_once_and_faults_are_passed_over(monkeypatch, caplog):
    source = Source("1", None, "2", "2", CorruptArtifact("half"), "other", "other", "3")
    assert taken(monkeypatch, source, "3") == ["2", "3"] and source.dropped == ["other"]
    assert "half" in caplog.text and "keeps its weights" in caplog.text


def test_weights_that_could_not_be_read_once_are_taken_later_and_the_reason_is_said_once(monkeypatch, caplog):
    source = Source("2", faults=[SamplerError("half written")] * 3)
    assert taken(monkeypatch, source, "2") == ["2"] and caplog.text.count("half written") == 1
