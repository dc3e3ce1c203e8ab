"""From a grid to one pipeline in which what points share stands once."""

import pytest
import yaml

import nanodag.cli.run  # noqa: F401 - before a test patches what it imports
from nanodag.cli.composed import sweep as start_sweep
from nanodag.config import order_of, resolve
from nanodag.errors import ConfigError
from nanodag.sweep.halving import metrics_of
from nanodag.sweep.sweep_run import in_waves, make_sweep, points_of, values_of
from tests.fake_stages import STAGES


@pytest.fixture
def file(tmp_path, no_settings):
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"default": "tiny", "presets": {"tiny": {"stages": STAGES}}}, sort_keys=False))
    return path


def test_a_sweep_checks_what_its_record_has_not_finished(file, monkeypatch):
    def stop(pipeline, store, *, to_build, **about):
        raise ConfigError(" ".join(sorted(to_build)))

    monkeypatch.setattr("nanodag.run.preflight.check_before_start", stop)
    monkeypatch.setattr("nanodag.run.record.unfinished", lambda pipeline, record: ["sft-2", "eval_sft-2"])
    with pytest.raises(ConfigError, match=r"^eval_sft-2 sft-2$"):
        start_sweep(grid=["sft.num_epochs=[1,2]"], preset="tiny", file=str(file), name="s")


def test_a_grid_has_every_combination_and_lists_multiply_it():
    points = points_of(["a.x=[1,2]", "b.y=[1e-3,adamw]"], [])
    every = [("a.x=1", "b.y=0.001"), ("a.x=1", "b.y=adamw"), ("a.x=2", "b.y=0.001"), ("a.x=2", "b.y=adamw")]
    assert [point.overrides for point in points] == every
    points = points_of(["a.x=[1,2]"], [["c.z=[1,2]"], ["c.z=[3]", "d.w=4"]])
    assert [point.overrides for point in points][1::2] == [("a.x=2", "c.z=[1,2]"), ("a.x=2", "c.z=[3]", "d.w=4")]
    assert values_of(points[3]) == {"a.x": "2", "c.z": "[3]", "d.w": "4"}


def test_what_points_share_is_one_stage_and_what_they_set_is_one_a_value(file):
    sweep = make_sweep(file, "tiny", [], ["sft.num_epochs=[1,2,3]"], [], "")
    assert sweep.stage == "sft"
    # The report is no part of it, nor the eval of another stage's model.
    multiplied = {f"{stage}-{number}" for stage in ("sft", "eval_sft") for number in (1, 2, 3)}
    assert set(sweep.pipeline.stages) == {"tokenizer", "pretrain"} | multiplied
    assert sweep.pipeline.stages["eval_sft-2"].inputs == {"model": "sft-2"}
    assert sweep.pipeline.stages["sft-3"].num_epochs == 3
    shared = {"tokenizer": "tokenizer", "pretrain": "pretrain"}
    assert sweep.points[1].stages == {**shared, "sft": "sft-2", "eval_sft": "eval_sft-2"}


def test_a_change_below_is_shared_by_the_points_that_have_it(file):
    grid = ["pretrain.seed=[1,2]", "sft.seed=[1,2,3]"]
    sweep = make_sweep(file, "tiny", [], grid, [], "")
    kinds = [stage.kind for stage in sweep.pipeline.stages.values()]
    assert (kinds.count("tokenizer"), kinds.count("pretrain"), kinds.count("sft"), kinds.count("eval")) == (1, 2, 6, 6)
    assert sweep.pipeline.stages["sft-5"].inputs == {"model": "pretrain-4"}, "named by the first point that has it"
    waves = in_waves(sweep, list(sweep.pipeline.stages))
    assert [kind[0] for kind in waves] == list("tpp" + "s" * 6 + "e" * 6)
    assert sorted(waves) == sorted(order_of(sweep.pipeline))


def test_points_that_come_to_the_same_config_are_one_stage(file):
    sweep = make_sweep(file, "tiny", [], [], [["sft.seed=1"], ["sft.seed=1", "sft.num_epochs=1.0"]], "")
    assert [point.stages["sft"] for point in sweep.points] == ["sft", "sft"]


@pytest.mark.parametrize(
    ("grid", "listed", "stage", "said"),
    [
        ([], [], "", "A sweep needs a grid"),
        (["sft.num_epochs=2"], [], "", "give a list of values, as sft.num_epochs=\\[1,2\\]"),
        (["sft.num_epoch=[1,2]"], [], "", "(?s)Point 1 .*there is no such key.*num_epochs"),
        (["sft.num_epochs=[1,-2]"], [], "", "Point 2 \\(sft.num_epochs=-2\\)"),
        (["store.url=[a,b]"], [], "", "'store.url' belongs to the sweep as a whole"),
        (["sft.seed=[1,2]"], [["sft.seed=3"]], "", "Point 1 sets an option twice"),
        (["sft.seed=[1,2]"], [], "eval_sft", "Stage eval_sft is of kind eval"),
        (["seed=[1,2]"], [], "", "No point sets an option of a stage"),
        (["sft.seed=[1,2]", *(f"sft.x{n}=[1,2]" for n in range(9)), "sft.y=[1,2]"], [], "", "1000 is the limit"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_starts(file, grid, listed, stage, said):
    with pytest.raises(ConfigError, match=said):
        make_sweep(file, "tiny", [], grid, listed, stage)


def test_a_short_and_a_full_name_of_one_option_set_it_twice(file):
    document = yaml.safe_load(file.read_text())
    rl = {"kind": "rl", "inputs": {"model": "sft"}, "data": STAGES["sft"]["data"]}
    document["presets"]["tiny"]["stages"]["rl"] = rl
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    grid = ["rl.learning_rate=[1e-6,2e-6]", "rl.optimizer.learning_rate=[3e-6]"]
    listed = ["rl.optimizer.learning_rate=1e-6", "rl.learning_rate=2e-6"]
    for twice in ((grid, []), ([], [listed])):
        with pytest.raises(ConfigError, match="Point 1 sets an option twice"):
            make_sweep(file, "tiny", [], *twice, "")
    assert len(make_sweep(file, "tiny", [], grid[:1], [["rl.optimizer.warmup_steps=2"]], "").points) == 2


def test_an_eval_of_the_compared_stage_brings_its_own_inputs_and_no_variant_takes_another_stages_name(file):
    document = yaml.safe_load(file.read_text())
    stages = document["presets"]["tiny"]["stages"]
    stages["eval_sft"]["inputs"] = {"model": "sft", "baseline": "eval_base"}
    stages["eval_sft"]["benchmarks"] = [{"name": "x", "source": "file:text.txt", "judge": "/judge"}]
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    sweep = make_sweep(file, "tiny", [], ["sft.seed=[1,2]"], [], "")
    assert sweep.pipeline.stages["eval_sft-2"].inputs == {"model": "sft-2", "baseline": "eval_base"}
    stages["eval_sft"] = STAGES["eval_sft"]
    stages["sft-1"] = {**STAGES["sft"], "seed": 7}
    rl = {"kind": "rl", "inputs": {"model": "sft", "reference": "sft-1"}, "data": STAGES["sft"]["data"]}
    stages["rl"] = {**rl, "algorithm": {"kl_coefficient": 0.1, "reference": {"model": "input"}}}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(ConfigError, match="another stage are both sft-1"):
        make_sweep(file, "tiny", [], ["sft.seed=[1,2]"], [], "rl")


def test_a_point_may_not_set_what_the_sweep_would_ignore(file):
    for setting in ("tracking.mode=offline", "notify.url=https://host", "plan.answer_share=0.5"):
        with pytest.raises(ConfigError, match="belongs to the sweep as a whole"):
            make_sweep(file, "tiny", [], [], [["sft.seed=1", setting], ["sft.seed=2"]], "")


def test_halving_judges_rl_by_its_own_validation_and_a_stage_without_held_out_rows_by_its_benchmark(file):
    document = yaml.safe_load(file.read_text())
    stages = document["presets"]["tiny"]["stages"]
    source = STAGES["sft"]["data"]
    stages["rl"] = {"kind": "rl", "inputs": {"model": "sft"}, "data": source, "evaluation": {"validation": source}}
    stages["sft"]["benchmarks"] = [{"name": "x", "source": "file:text.txt"}]
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    resolved = resolve(file, "tiny", []).pipeline.stages
    assert metrics_of(resolved["rl"])[0] == "eval_reward"
    assert metrics_of(resolved["sft"]) == ["benchmark_x"], "nothing is held out of its data"


def test_relative_files_of_points_and_grid_are_those_of_the_callers_folder(file, tmp_path, monkeypatch):
    def stop(path, preset, overrides, grid, listed, stage, **about):
        raise ConfigError(" ".join([*grid, *listed[0]]))

    monkeypatch.setattr("nanodag.sweep.sweep_run.make_sweep", stop)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:  # the flow's process has another working directory
        start_sweep(grid=["sft.data=[[file:a.txt]]"], point=["pretrain.data=[file:b.txt]"], file=str(file))
    assert str(refused.value).count(f"file:{tmp_path}/") == 2
