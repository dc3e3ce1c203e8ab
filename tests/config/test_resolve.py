"""pipeline.yaml, presets, overrides: where each value came from; words, ranges and short names of settings; and
what `gsm8k-rl` has in the place of every option of slime's script, as docs/how-to/rl-algorithm.md says."""

import re
from pathlib import Path

import pytest
import yaml

from nanodag.cli.show import explain_setting
from nanodag.config import order_of, resolve, result_config
from nanodag.config.derive import BUNDLE
from nanodag.config.kinds import shipped
from nanodag.config.model_size import model_of
from nanodag.config.pipeline import Pipeline, read_stage
from nanodag.config.reference import setting, words_of
from nanodag.config.resolve import leaves, portable
from nanodag.config.rl_parts import EntryConfig
from nanodag.config.section import models_in, sections_of
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from tests.config.stages import STAGES

SHIPPED = PROJECT / "pipeline.yaml"


@pytest.fixture
def file(tmp_path, no_settings):
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
    assert all(resolved.origins[name] for name, _ in leaves(resolved.pipeline))
    left = {name for name, value in leaves(resolved.pipeline) if value == "auto"}
    kept = ("store.local", "server.folder", "plan.groups_with_spread", ".bos", ".sampler.python", ".sync_address")
    assert not {name for name in left if not name.endswith(kept)}
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


def test_a_preset_extends_another_and_drops_a_stage_and_an_override_wins_the_last_one_over_the_first(file):
    assert resolve(file, "two").pipeline.stages["rl"].optimizer.learning_rate == 1e-5
    assert list(resolve(file, "short").pipeline.stages) == ["tokenizer", "base"]
    pipeline = resolve(file, "two", ["rl.learning_rate=2e-6", "seed=1", "seed=2"]).pipeline
    assert (pipeline.stages["rl"].optimizer.learning_rate, pipeline.seed) == (2e-6, 2)


def test_what_a_derived_device_cannot_do_is_refused_before_anything_runs(file):
    gpu = machine_of("1xH100")
    with pytest.raises(ConfigError, match=r"sync_check_every 20: weights of vLLM"):
        resolve(file, "one", ["rl.sampler.engine=sglang", "rl.sync_check_every=20"], machine=gpu)
    with pytest.raises(ConfigError, match=r"stages\.rl\.sampler\.deterministic: true on a GPU"):
        resolve(file, "one", ["rl.sampler.deterministic=true"], machine=gpu)
    stage = resolve(file, "one", ["rl.sampler.engine=sglang"], machine=gpu).pipeline.stages["rl"]
    assert (stage.weights.sync_check_every, stage.sampler.deterministic) == (0, False)


def with_more(file, **changes):
    """The preset with a stage `more` that goes on pretraining `base`."""
    document = yaml.safe_load(file.read_text())
    stages = document["presets"]["one"]["stages"]
    more = stages["base"] | {"inputs": {"model": "base"}, "horizon_tokens": 6400, "shape": None} | changes
    stages["more"] = {name: value for name, value in more.items() if value is not None}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def test_pretraining_that_goes_on_takes_its_rates_from_the_stage_where_the_model_began(file):
    stages = resolve(with_more(file), "one").pipeline.stages
    base, more = stages["base"], stages["more"]
    assert (base.is_from_scratch, more.is_from_scratch, more.horizon_tokens) == (True, False, 6400)
    assert more.optimizer.matrix_lr == pytest.approx(0.02 * (64 / 2**19) ** 0.5, abs=1e-6)  # rule 6 of the dial
    assert more.optimizer == base.optimizer


@pytest.mark.parametrize("changes, said", [
    ({"inputs": {}}, "more.inputs: found none; name either a tokenizer, .* or a model"),
    ({"inputs": {"model": "base", "tokenizer": "tokenizer"}}, "more.inputs: found model, tokenizer; name"),
    ({"inputs": {"tokenizer": "tokenizer"}}, "more.shape.depth is missing: random weights need one"),
    ({"shape": {"extend_by": "ntk"}}, "more.shape is that of inputs.model; leave it out"),
    ({"shape": {"depth": 2}}, "more.shape is that of inputs.model; leave it out"),
    ({"shape": {"extend_to": 4096}}, "more.shape.extend_to 4096 is not sequence_length 8: a"),
    ({"shape": {"extend_to": 64}, "sequence_length": 64}, "more.shape.extend_to: 64 is no more than the 2048"),
    ({"shape": {"extend_to": 64, "depth": 2}, "inputs": {"tokenizer": "tokenizer"}}, "extend_to extends a model; a"),
    ({"horizon_tokens": None}, "more.horizon_tokens auto: the dial's is for random weights; say for how many"),
    ({"tokens_per_parameter": 8}, "more.tokens_per_parameter means nothing to a model that goes on"),
])  # fmt: skip
def test_pretraining_begins_at_one_thing_and_says_what_that_needs(file, changes, said):
    with pytest.raises(ConfigError, match=said):
        resolve(with_more(file, **changes), "one")


def test_a_model_that_was_extended_is_planned_with_its_positions(file):
    pipeline = resolve(
        with_more(file, shape={"extend_to": 4096}, sequence_length=4096, batch_tokens=4096), "one"
    ).pipeline
    assert [model_of(pipeline, name).max_positions for name in ("base", "more")] == [2048, 4096]


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
    benchmarks = [{"name": "core"}, {"name": "bits_per_byte", "source": "file:text.txt"}]
    evaluated = {"kind": "eval", "inputs": {"model": "base"}, "benchmarks": benchmarks}
    document["presets"]["core"] = {"extends": "one", "stages": {"base": {"core_every": 10}, "eval": evaluated}}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def test_without_a_bundle_core_is_left_out_of_every_stage_and_a_warning_says_so(core_file):
    resolved, stages = with_core(core_file)
    assert stages["base"].core_every == 0
    assert [benchmark.name for benchmark in stages["eval"].benchmarks] == ["bits_per_byte"]
    (said,) = [text for text in resolved.warnings if "CORE" in text]
    assert said.startswith("CORE is left out of base, eval: core_bundle is none. Set core_bundle, or NANODAG_CORE_")
    assert said.endswith(f", to {BUNDLE} or a folder with its files")
    assert resolved.origins["base.core_every"] == "derived: core_bundle is none"
    _, stages = with_core(core_file, "core_bundle=/a/bundle", "base.core_bundle=none")
    assert stages["base"].core_every == 0, "left out of that stage alone"
    with pytest.raises(ConfigError, match=r"eval.benchmarks: CORE alone, and core_bundle is none"):
        with_core(core_file, "eval.benchmarks=[{name: core}]")


def test_a_bundle_is_what_every_stage_takes_its_items_from(core_file, tmp_path, monkeypatch):
    monkeypatch.setenv("NANODAG_CORE_BUNDLE", str(tmp_path / "bundle"))
    resolved, stages = with_core(core_file)
    assert (stages["base"].core_every, stages["base"].core_bundle) == (10, str(tmp_path / "bundle"))
    assert stages["eval"].benchmarks[0].source.url == f"file:{tmp_path}/bundle/**/*.jsonl*"
    assert not [text for text in resolved.warnings if "CORE" in text]
    assert resolved.origins["core_bundle"] == "environment NANODAG_CORE_BUNDLE"
    resolved, stages = with_core(core_file, f"core_bundle={BUNDLE}")
    written = resolved.pipeline.model_dump(mode="json")  # for a worker
    assert Pipeline.model_validate(written) == resolved.pipeline
    assert stages["base"].core_bundle == stages["eval"].benchmarks[0].source.url == BUNDLE
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


def classes(model):
    """A class, and those that its fields hold at any depth."""
    inner = (each for field in model.model_fields.values() for each in models_in(field.annotation))
    return {model}.union(*map(classes, inner))


def test_every_setting_has_words():
    models = classes(Pipeline).union(*(classes(kind.config) for kind in shipped().values()))
    fields = [(model, name, field) for model in models for name, field in model.model_fields.items()]
    assert len(fields) > 300
    assert [f"{model.__name__}.{name}" for model, name, field in fields if name != "kind" and not words_of(field)] == []


@pytest.mark.parametrize("kind", shipped())
def test_no_two_settings_of_a_stage_have_one_short_name(kind):
    stage = shipped()[kind].config
    names = [*stage.model_fields, *(name for section in sections_of(stage).values() for name in section.model_fields)]
    assert sorted(set(names)) == sorted(names)


def test_options_with_a_setting_of_their_own_name_one_that_exists():
    fields = shipped()["rl"].config.model_fields["algorithm"].annotation.model_fields
    for model in EntryConfig.__subclasses__():
        for name in model.settings.values():
            first, _, last = name.partition(".")
            assert first in fields and (not last or last in fields[first].annotation.model_fields), name


def test_a_short_name_says_what_the_setting_is_and_where_its_value_came_from():
    found = setting(resolve(SHIPPED, "gsm8k-rl", ["rl.clip_low=0.1"]), "rl.clip_high")
    assert (found.name, found.type, found.default, found.value) == (
        "rl.algorithm.clip_high", "number, above 0, at most 100", "0.2", 0.28
    )  # fmt: skip
    assert found.words.startswith("Upper clip of ppo_clip") and found.origin == "preset gsm8k-rl"


@pytest.mark.parametrize(("name", "said"), [
    ("rl.clip_hihg", "no setting 'rl.clip_hihg'. Did you mean 'rl.algorithm.clip_high'"),
    ("rll.clip_high", "Did you mean 'rl.algorithm.clip_high'"),
    ("store.ulr", "Did you mean 'store.url'"),
    ("rl", "rl is a stage of kind rl; name a setting of it: kind, inputs, seed"),
])  # fmt: skip
def test_a_name_that_is_no_setting_is_refused_with_the_nearest(name, said):
    with pytest.raises(ConfigError, match=said):
        setting(resolve(SHIPPED, "gsm8k-rl"), name)


def test_nanodag_config_explains_a_setting(capsys):
    explain_setting("rl.advantage", ["rl.advantage=rloo"], preset="gsm8k-rl", file=str(SHIPPED))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rl.algorithm.advantage, preset gsm8k-rl"
    assert "  shipped   grpo, dr_grpo, rloo, reinforce_pp," in lines[3]
    assert lines[4:] == ["  default   grpo", "  value     rloo    # override"]


PAGE = (PROJECT / "docs" / "how-to" / "rl-algorithm.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("beside slime's script")[2].partition("## Names of TRL")[0]
ROW = re.compile(r"^\|.*\| `([a-z][\w.]+)` \| `([^`]+)` \|$", re.MULTILINE)
# Of tests/test-qwen2.5-0.5B-gsm8k.sh, without the model's shape, which comes with the checkpoint.
SCRIPT = """hf-checkpoint ref-load prompt-data input-key label-key apply-chat-template rollout-shuffle rm-type
num-rollout rollout-batch-size n-samples-per-prompt rollout-max-response-len rollout-temperature
over-sampling-batch-size
dynamic-sampling-filter-path global-batch-size eval-interval eval-prompt-data n-samples-per-eval-prompt
eval-max-response-len eval-top-k tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size
context-parallel-size expert-model-parallel-size expert-tensor-parallel-size use-dynamic-batch-size max-tokens-per-gpu
advantage-estimator use-kl-loss kl-loss-coef kl-loss-type entropy-coef eps-clip eps-clip-high optimizer lr
lr-decay-style weight-decay adam-beta1 adam-beta2 use-wandb wandb-project wandb-group rollout-num-gpus-per-engine
sglang-mem-fraction-static attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32
attention-softmax-in-fp32 attention-backend actor-num-nodes actor-num-gpus-per-node colocate"""


@pytest.fixture(scope="module")
def stages():
    """The preset that follows slime's script."""
    resolved = resolve(SHIPPED, "gsm8k-rl", machine=machine_of("4xH100"))
    return resolved.pipeline.model_dump(mode="json")["stages"]


def at(table, name: str):
    """The value of a dotted name, places in lists by number."""
    for part in name.split("."):
        table = table[int(part)] if isinstance(table, list) else table[part]
    return table


def test_the_preset_is_what_the_table_says(stages):
    said = ROW.findall(PAGE)
    assert len(said) >= 40
    assert {name: at(stages, name) for name, _ in said} == {name: yaml.safe_load(value) for name, value in said}


def test_every_option_of_the_script_is_in_a_table():
    rows = " ".join(line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `--"))
    named = set(re.findall(r"--([\w-]+)", rows))
    assert set(SCRIPT.split()) - named == set()


def test_training_evaluation_and_benchmarks_ask_and_judge_alike(stages):
    sources = [stages["rl"]["data"][0], stages["rl"]["evaluation"]["validation"][0]]
    sources += [stages[name]["benchmarks"][0]["source"] for name in ("eval_base", "eval_rl")]
    assert {(one["instruction"], one["reward"]) for one in sources} == {
        ("{question}\nPlease reason step by step, and put your final answer within \\boxed{}.", "boxed_math")
    }
    assert {stages[name]["benchmarks"][0]["form"] for name in ("eval_base", "eval_rl")} == {"problems"}
    assert stages["rl"]["rollout"]["filters"] == [{"name": "nonzero_spread", "options": {}}]
    assert stages["eval_rl"]["max_new_tokens"] == stages["rl"]["rollout"]["max_new_tokens"]


def test_a_setting_that_is_newer_than_its_kind_is_in_a_key_only_where_it_is_set():
    items = [{"name": "sort", "form": "problems", "source": "file:a"}]
    of_model = read_stage({"kind": "eval", "inputs": {"model": "m"}, "benchmarks": items})
    served = read_stage({"kind": "eval", "endpoint": {"url": "http://h/v1", "model": "m"}, "benchmarks": items})
    assert "endpoint" not in result_config(of_model)
    assert result_config(served)["endpoint"] == {"url": "http://h/v1", "model": "m"}
