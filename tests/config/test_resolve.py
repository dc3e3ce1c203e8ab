"""pipeline.yaml, presets, overrides: what is refused, how it is said, where each value came from."""

from pathlib import Path

import pytest
import yaml

from nanodag.config import order_of, resolve, result_config
from nanodag.config.resolve import leaves, portable
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from tests.config.stages import STAGES

SHIPPED = PROJECT / "pipeline.yaml"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("NANODAG_MIRROR", raising=False)
    monkeypatch.delenv("NANODAG_STORE", raising=False)
    presets = {
        "one": {"stages": STAGES},
        "two": {"extends": "one", "seed": 7, "stages": {"rl": {"learning_rate": 1.0e-5}}},
        "short": {"extends": "one", "stages": {"rl": "drop"}},
        "loop": {"extends": "pool"},
        "pool": {"extends": "loop"},
    }
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"default": "one", "presets": presets}, sort_keys=False))
    return path


@pytest.mark.parametrize("preset", list(yaml.safe_load(SHIPPED.read_text())["presets"]))
def test_every_shipped_preset_loads_with_an_origin_for_every_value(preset):
    resolved = resolve(SHIPPED, preset)
    for name, value in leaves(resolved.pipeline):
        assert resolved.origins[name], name
        assert (
            value != "auto"
            or name in ("store.local", "rl.reward", "plan.groups_with_spread")
            or ".adapter" in name
            or ".form" in name
            or name.endswith((".bos", ".sampler.python", ".sync_address"))
        ), name
    assert set(order_of(resolved.pipeline)) == set(resolved.pipeline.stages)


def test_origins_say_default_preset_override_environment_and_derived(file, monkeypatch):
    monkeypatch.setenv("NANODAG_MIRROR", "/m")
    resolved = resolve(file, "two", ["rl.temperature=0.5"])
    expected = {
        "mirror": "environment NANODAG_MIRROR", "seed": "preset two", "rl.optimizer.learning_rate": "preset two",
        "rl.rollout.temperature": "override", "rl.algorithm.clip_low": "default",
        "rl.seed": "derived: the pipeline's seed", "base.shape.depth": "preset one",
        "base.shape.width": "derived: depth 2",
    }  # fmt: skip
    assert {name: resolved.origins[name] for name in expected} == expected
    assert resolved.pipeline.stages["rl"].seed == 7
    assert resolved.origins["base.batch_tokens!"].startswith("the dial says")


def test_a_preset_extends_another_and_drops_a_stage(file):
    assert resolve(file, "two").pipeline.stages["rl"].optimizer.learning_rate == 1e-5
    assert list(resolve(file, "short").pipeline.stages) == ["tokenizer", "base"]


def test_an_override_wins_over_the_preset_and_the_last_one_over_the_first(file):
    pipeline = resolve(file, "two", ["rl.learning_rate=2e-6", "seed=1", "seed=2"]).pipeline
    assert (pipeline.stages["rl"].optimizer.learning_rate, pipeline.seed) == (2e-6, 2)


def test_what_a_derived_device_cannot_do_is_refused_before_anything_runs(file):
    gpu = machine_of("1xH100")
    with pytest.raises(ConfigError, match=r"stages\.rl\.weights\.sync_check_every 20: SGLang .* on a GPU"):
        resolve(file, "one", ["rl.sampler.engine=sglang", "rl.sync_check_every=20"], machine=gpu)
    with pytest.raises(ConfigError, match=r"stages\.rl\.sampler\.deterministic: true on a GPU"):
        resolve(file, "one", ["rl.sampler.deterministic=true"], machine=gpu)
    stage = resolve(file, "one", ["rl.sampler.engine=sglang"], machine=gpu).pipeline.stages["rl"]
    assert (stage.weights.sync_check_every, stage.sampler.deterministic) == (0, False)


MORE = {
    "kind": "pretrain", "inputs": {"model": "base"}, "data": ["file:text.txt"], "sequence_length": 8,
    "batch_tokens": 64, "horizon_tokens": 6400,
}  # fmt: skip


def with_more(file, **changes):
    """The preset with a stage `more` that goes on pretraining `base`."""
    document = yaml.safe_load(file.read_text())
    more = {name: value for name, value in {**MORE, **changes}.items() if value is not None}
    document["presets"]["one"]["stages"]["more"] = more
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def test_pretraining_that_goes_on_takes_its_rates_from_the_stage_where_the_model_began(file):
    stages = resolve(with_more(file), "one").pipeline.stages
    base, more = stages["base"], stages["more"]
    assert (base.continues, more.continues, more.horizon_tokens) == (False, True, 6400)
    assert more.optimizer.matrix_lr == pytest.approx(0.02 * (64 / 2**19) ** 0.5, abs=1e-6)  # rule 6 of the dial
    assert more.optimizer == base.optimizer


@pytest.mark.parametrize("changes, said", [
    ({"inputs": {}}, "more.inputs: found none; name either a tokenizer, .* or a model"),
    ({"inputs": {"model": "base", "tokenizer": "tokenizer"}}, "more.inputs: found model, tokenizer; name"),
    ({"inputs": {"tokenizer": "tokenizer"}}, "more.shape.depth is missing: random weights need one"),
    ({"shape": {"depth": 2}}, "more.shape is that of inputs.model; leave it out"),
    ({"horizon_tokens": None}, "more.horizon_tokens auto: the dial's is for random weights; say for how many"),
    ({"tokens_per_parameter": 8}, "more.tokens_per_parameter means nothing to a model that goes on"),
])  # fmt: skip
def test_pretraining_begins_at_one_thing_and_says_what_that_needs(file, changes, said):
    with pytest.raises(ConfigError, match=said):
        resolve(with_more(file, **changes), "one")


def test_an_unknown_preset_is_refused_with_the_nearest(file):
    with pytest.raises(ConfigError, match=r"no preset 'shot'; it has one, two, short.* Did you mean 'short'\?"):
        resolve(file, "shot")
    with pytest.raises(ConfigError, match="extends itself"):
        resolve(file, "loop")


def test_operational_fields_are_no_part_of_the_result(file):
    def key_part(*overrides):
        return result_config(resolve(file, "one", overrides).pipeline.stages["base"])

    same = key_part("base.log_every=3", "base.checkpoint_every=9", "base.resources.threads=5", "base.timeout_s=5")
    assert same == key_part()
    assert key_part("base.precision=fp32") != key_part("base.precision=bf16")
    assert "log_every" not in key_part() and "resources" not in key_part()


def test_relative_paths_begin_at_the_file_and_in_overrides_at_the_working_directory(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    pipeline = resolve(file, "one").pipeline
    assert pipeline.store.url == str(tmp_path / "store")
    assert pipeline.stages["base"].data[0].url == f"file:{tmp_path}/text.txt"
    assert pipeline.stages["tokenizer"].data[0].url == "file:/x.txt"
    given = resolve(file, "one", ["store.url=here", "base.data=['file:t.txt']"]).pipeline
    assert given.store.url == str(elsewhere / "here")
    assert given.stages["base"].data[0].url == f"file:{elsewhere}/t.txt"
    assert resolve(file, "one", ["store.url=s3://b/x"]).pipeline.store.url == "s3://b/x"
    carried = portable(["base.data=['file:t.txt']", "rl.learning_rate=2e-6"])
    monkeypatch.chdir(Path("/"))
    assert resolve(file, "one", carried).pipeline.stages["base"].data[0].url == f"file:{elsewhere}/t.txt"
    assert carried[1] == "rl.learning_rate=2e-6"


def test_a_resolved_pipeline_written_to_a_file_means_itself(file, tmp_path):
    given = ["rl.reward={gsm8k: 1, f1: 0.5}", "rl.advantage=rloo", "rl.generate=calculator"]
    pipeline = resolve(file, "one", given).pipeline
    written = pipeline.model_dump(mode="json", exclude={"preset"}, exclude_none=True)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump({"presets": {"one": written}}))
    assert resolve(tmp_path / "again.yaml", "one").pipeline == pipeline


def with_core(file, *overrides):
    resolved = resolve(file, "core", overrides)
    return resolved, resolved.pipeline.stages


@pytest.fixture
def core_file(file, monkeypatch):
    """A preset with CORE in training and in an eval stage."""
    monkeypatch.delenv("NANODAG_CORE_BUNDLE", raising=False)
    document = yaml.safe_load(file.read_text())
    bits = {"name": "bits_per_byte", "source": "file:text.txt"}
    stages = {
        "base": {"core_every": 10},
        "eval": {"kind": "eval", "inputs": {"model": "base"}, "benchmarks": [{"name": "core"}, bits]},
    }
    document["presets"]["core"] = {"extends": next(iter(document["presets"])), "stages": stages}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def test_without_a_bundle_core_is_left_out_of_every_stage_and_a_warning_says_so(core_file):
    resolved, stages = with_core(core_file)
    assert stages["base"].core_every == 0
    assert [benchmark.name for benchmark in stages["eval"].benchmarks] == ["bits_per_byte"]
    (said,) = [text for text in resolved.warnings if "CORE" in text]
    assert said.startswith("CORE is left out of base, eval: core_bundle is none. Fetch and unpack https://")
    assert resolved.origins["base.core_every"] == "derived: core_bundle is none"
    with pytest.raises(ConfigError, match=r"eval.benchmarks: CORE alone, and core_bundle is none"):
        with_core(core_file, "eval.benchmarks=[{name: core}]")


def test_a_bundle_is_what_every_stage_takes_its_items_from(core_file, tmp_path, monkeypatch):
    monkeypatch.setenv("NANODAG_CORE_BUNDLE", str(tmp_path / "bundle"))
    resolved, stages = with_core(core_file)
    assert (stages["base"].core_every, stages["base"].core_bundle) == (10, str(tmp_path / "bundle"))
    assert stages["eval"].benchmarks[0].source.url == f"file:{tmp_path}/bundle/**/*.jsonl*"
    assert not [text for text in resolved.warnings if "CORE" in text]
    assert resolved.origins["core_bundle"] == "environment NANODAG_CORE_BUNDLE"
    _, stages = with_core(core_file, "eval.benchmarks=[{name: core, source: 'file:/mine/*.jsonl'}]")
    assert stages["eval"].benchmarks[0].source.url == "file:/mine/*.jsonl"


def test_scoring_core_while_training_is_no_part_of_the_result(core_file):
    _, stages = with_core(core_file, "core_bundle=/bundle")
    _, others = with_core(core_file, "core_bundle=/other", "base.core_every=0", "base.core_limit=17")
    assert result_config(stages["base"]) == result_config(others["base"])


@pytest.mark.parametrize(
    ("override", "said"),
    [("base.core_limit=10", "core_limit 10 is too few for CORE's worked examples; take 11 or 0"),
     ("eval.benchmarks=[{name: core, limit: 10}]", "limit 10 of CORE is too few for its worked examples; take 11")],
)  # fmt: skip
def test_fewer_items_of_core_than_its_worked_examples_are_refused(core_file, override, said):
    with pytest.raises(ConfigError, match=said):
        with_core(core_file, "core_bundle=/bundle", override)
