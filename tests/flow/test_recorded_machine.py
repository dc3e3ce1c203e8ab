"""What `auto` followed from stays with a run: resumed, retried or swept elsewhere, its stages keep their keys."""

import sys
from dataclasses import replace

import pytest

from nanodag.cli.run import run_pipeline
from nanodag.config import resolve, result_config
from nanodag.errors import ConfigError, StoreError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.nightly.nights import begin_night
from nanodag.run.build_stage import build_stage
from nanodag.run.record import join_run, recorded_run, unfinished
from nanodag.run.reproduce import reproduce
from nanodag.run.stale_stages import config_digest
from nanodag.store import Store
from nanodag.sweep.sweep_run import begin_sweep
from tests.flow.tiny_runs import opened
from tests.run_records import run_record, stage_record

LAPTOP, SERVER, GPUS = "cpu:2:avx2:8GiB", "cpu:16:amx:64GiB", "8xH100"
ASKING = ("config.derive_sampler", "run.record", "run.reproduce")


@pytest.fixture
def on(monkeypatch):
    """Take this machine for another one."""

    def become(text):
        for module in ASKING:
            monkeypatch.setattr(sys.modules[f"nanodag.{module}"], "detect", lambda *_: machine_of(text))

    return become


def configs(pipeline):
    return {name: (result_config(stage), stage.resources) for name, stage in pipeline.stages.items()}


def test_a_run_that_is_resumed_on_another_machine_keeps_every_setting(project, on):
    on(LAPTOP)
    begun = configs(opened().pipeline)
    on(SERVER)
    assert configs(resolve(project / "pipeline.yaml", "tiny").pipeline) != begun, "this machine would choose otherwise"
    assert configs(opened().pipeline) == begun
    assert configs(opened("sft.log_every=7").pipeline) == begun
    store = Store(project / "store")
    assert store.read_run("r").machine == LAPTOP
    _, recorded = recorded_run(store, "r", begin_at="sft")
    again = resolve(
        project / "pipeline.yaml", recorded.preset, recorded.overrides, machine=machine_of(recorded.machine)
    )
    assert configs(again.pipeline) == begun
    assert configs(join_run("r", store).pipeline) == begun, "a pool's worker too"


def test_a_sweep_that_is_resumed_on_another_machine_keeps_its_points(project, on):
    asked = {"grid": ["sft.seed=[1,2]"], "points": [], "stage": "", "preset": "tiny", "overrides": [], "file": ""}
    on(LAPTOP)
    begun = configs(begin_sweep("s", flow_run="", **asked)[0].pipeline)
    on(SERVER)
    assert configs(begin_sweep("s", flow_run="", **asked)[0].pipeline) == begun
    assert configs(begin_sweep("other", flow_run="", **asked)[0].pipeline) != begun


def test_a_night_that_is_resumed_on_another_machine_keeps_its_evals(project, on):
    on(LAPTOP)
    run = opened()
    build_stage(run, "pretrain", {"tokenizer": build_stage(run, "tokenizer", {})})
    base = run.entry("pretrain")
    run.store.change_run("r", lambda record: record.with_stage("pretrain", state="built", made=base.made))
    asked = {"file": "", "preset": "tiny", "overrides": ["nightly.stages=[pretrain]"], "by_schedule": False}
    begun = configs(begin_night(name="nightly-1", flow_run="a", **asked).run.pipeline)
    on(SERVER)
    assert configs(begin_night(name="nightly-1", flow_run="a", **asked).run.pipeline) == begun
    other = begin_night(name="nightly-2", flow_run="b", **asked).run.pipeline
    assert {stage.resources.threads for stage in other.stages.values()} == {16}
    assert [stage.sampler.replicas for stage in other.stages.values() if stage.kind == "eval"] == [4]


def test_a_run_of_gpus_is_refused_where_there_are_too_few_with_what_to_do(project, on):
    on(GPUS)
    opened("sft.resources.num_ranks=4").close()
    refusal = r"Run r was begun on 8xH100: its stage sft takes 4 GPUs, and this machine \(%s\) has %s\. Resume it where"
    on(LAPTOP)
    with pytest.raises(ConfigError, match=refusal % (LAPTOP, "none")):
        opened("sft.resources.num_ranks=4")
    with pytest.raises(ConfigError, match=r"begun on 8xH100: its stage \w+ takes"):
        run_pipeline([], preset="auto", file="", name="r", detach=True)
    on("1xH100")
    with pytest.raises(ConfigError, match=refusal % ("1xH100", "1")):
        opened("sft.resources.num_ranks=4")
    assert opened(only=["pretrain"]).to_do == ["pretrain"], "one GPU is enough for that stage"


def test_what_gpus_made_is_not_reproduced_without(run, on):
    build_stage(run, "tokenizer", {})
    made = run.store.get("r:tokenizer")
    of_gpu = replace(made, config={**made.config, "resources": {**made.config["resources"], "device": "cuda"}})
    on(LAPTOP)
    with pytest.raises(StoreError, match="was made on 1 GPU, and this machine has none"):
        reproduce(run.store, of_gpu, file="")


def test_what_is_finished_with_the_settings_of_now_need_not_fit_again():
    pipeline = resolve(PROJECT / "pipeline.yaml", "pocket", machine=machine_of(LAPTOP)).pipeline
    made = {"config": config_digest(pipeline.stages["tokenizer"])}
    other = {"config": config_digest(pipeline.stages["rl"])}
    stages = {
        "tokenizer": stage_record("tokenizer", made, state="built", key="0" * 40),
        "pretrain": stage_record("pretrain", other, state="built", key="0" * 40),
        "sft": stage_record("sft", state="failed"),
    }
    assert unfinished(pipeline, None) == list(pipeline.stages)
    assert set(pipeline.stages) - set(unfinished(pipeline, run_record("r", stages=stages))) == {"tokenizer"}
