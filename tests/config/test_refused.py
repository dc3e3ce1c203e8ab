"""What a pipeline file or an override may not say, and the one line that is said of it; and the reader of such files
against PyYAML, where both mean the same, and against whatever one may write."""

import inspect
import json
import os
import re
import resource
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanodag.config import resolve, rl_checks
from nanodag.config.document import LARGEST, MAX_BYTES, parse_yaml
from nanodag.config.resolve import leaves
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from tests.config.stages import STAGES


@pytest.fixture
def file(tmp_path, no_settings):
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump({"default": "one", "presets": {"one": {"stages": STAGES}}}, sort_keys=False))
    return path


def refusal(file, *overrides, preset="one"):
    """The message without the file's folder and the preset."""
    with pytest.raises(ConfigError) as caught:
        resolve(file, preset, overrides, machine=machine_of("cpu:2:avx2:8GiB"))
    return str(caught.value).replace(f"{file.parent}/", "").removeprefix("p.yaml, preset 'one': ")


@pytest.mark.parametrize(("override", "said"), [
    ("rl.lerning_rate=1", "rl.lerning_rate: there is no such key. Did you mean 'optimizer.learning_rate'?"),
    ("rl.tool_use=true", "rl.tool_use: there is no such key. `nanodag config` prints all."),
    ("rl={rollout: 3, temperature: 2}", "temperature is a setting of the section rollout, which is no table"),
    ("rl={rollout: {temperature: 1}, temperature: 2}", "temperature stands twice: by its short name, and in the"),
    ("base.shape.dept=1", "base.shape.dept: there is no such key. Did you mean 'depth'?"),
    ("store.place=x", "store.place: there is no such key. Allowed: url, local, mirror_checkpoints."),
    ("rll.seed=1", "Override 'rll.seed=1': there is no stage or setting 'rll'. Did you mean 'rl'?"),
    ("rl.inputs.model=bse", "rl.inputs.model: there is no stage 'bse'. Did you mean 'base'?"),
    ("rl.reward=gms8k", "as package.module:function. Did you mean 'gsm8k'?"),
    ("rl.kind=grpo", "rl: there is no kind 'grpo'; kinds are tokenizer, import, pretrain, midtrain, sft, select,"),
    ("rl.inputs={}", "rl of kind rl needs the input model; found none"),
    ("rl.inputs={model: tokenizer}", "rl.inputs.model: stage tokenizer, of kind tokenizer, is not a model; name"),
    ("base.inputs.tokenizer=rl", "base.inputs.tokenizer: stage rl, of kind rl, is not a tokenizer; name one of"),
    ("rl.inputs={model: base, critc: base}", "rl.inputs: there is no input 'critc'. Did you mean 'critic'?"),
    ("rl.inputs={model: rl}", "stages rl wait for each other; a DAG has no cycle"),
    ("rl.teacher.model=input", "rl: algorithm.teacher.model 'input' and inputs (model) do not fit together; name"),
    ("rl.num_steps=true", "rl.num_steps: must be a whole number (found true)"),
    ("rl.num_steps=2.5", "rl.num_steps: must be a whole number (found 2.5)"),
    ("rl.num_steps='5'", "rl.num_steps: must be a whole number (found '5'); write 5, without quotes"),
    ("seed=1_000", "seed: must be a whole number (found '1_000'); write 1000, without underscores"),
    ("seed=010", "Override 'seed=010': 010: YAML 1.2 reads 10 here and 1.1 8; write 10, or quote it."),
    ("seed=", "seed: must be a whole number (found nothing)"),
    ("rl.compile=yes", "rl.optimizer.compile: must be true or false or 'auto' (found 'yes'); write true"),
    ("rl.temperature=.nan", "rl.rollout.temperature: must be a finite number (found nan)"),
    ("rl.aggregation=sum", "rl.algorithm.aggregation: there is no aggregation 'sum'; choose one of token,"),
    ("base.batch_tokens=x", "base.batch_tokens: must be a whole number or 'auto' (found 'x')"),
    ("rl.reward={gsm8k: x}", "rl.reward.0.weight: must be a number (found 'x')"),
    ("rl.reward=[gsm8k, 5]", "rl.reward.1: must be a table (found 5)"),
    ("rl.inputs=[[1]]", "rl.inputs: must be a table (found [[1]])"),
    ("rl.betas=[0.9]", "rl.optimizer.betas: has too few values"),
    ("base.data=[]", "base.data: must have at least 1 entry"),
    ("base.data=[{weight: 1}]", "base.data.0.url: is missing"),
    (f"seed={'9' * 5000}", f"the number {'9' * 20}... of 5000 digits is too large"),
    ("rl.zero_stage='1'", "rl.optimizer.zero_stage: must be a whole number (found '1'); write 1, without quotes"),
    ("rl.generate={name: agent, options: {command: python agent.py}}",
     "seconds, as in {name: agent, options: {command: [python, agent.py]}}"),
    ("rl.profile_steps=[3,101]", "rl: profile_steps [3, 101] has a step above num_steps 100, which never comes;"),
    ("rl.warmup_steps=101", "rl: optimizer.warmup_steps 101 is above num_steps 100, so that step never comes;"),
    ("base.patience=2", "base: patience 2 waits for a better validation loss, and no source of data has"),
    ("base={patience: 2, validation_tokens: 0, data: [{url: 'file:/x.txt', held_out: 0.1}]}",
     "base: patience 2 waits for a better validation loss, and validation_tokens is 0; give a source held_out,"),
    ("rl={sequence_parallel: 7, num_ranks: 1}", "rl: optimizer.sequence_parallel 7 ranks share each row, and"),
    ("rl.sequence_parallel=7", "rl: sequence_parallel has 7 ranks share each row, and this machine"),
    ("base={sequence_parallel: 2, num_ranks: 2, num_heads: 3, num_kv_heads: 3}", "base.sequence_parallel: 2 does not"),
    ("base.optimizer.lora_base=nf4", "base: optimizer.lora_base means nothing without optimizer.lora_rank"),
    ("rl={sequence_parallel: 3, num_ranks: 3}", "rl.sequence_parallel: 3 does not divide the model's"),
    ("base={sequence_parallel: 3, sequence_length: 128}", "base: sequence_parallel 3 does not divide sequence_length"),
    ("rl.tensor_parallel=8", "rl.tensor_parallel: there is no such key. Did you mean 'sampler.tensor_parallel'?"),
    ("rl.sampler.tensor_parallel=8", "rl.sampler.tensor_parallel: 8 GPUs share a model with sglang or vllm only,"),
    ("nightly.stages=[base,rll]", "nightly.stages: no preset of the file has a stage 'rll'. Did you mean 'rl'?"),
    ("store.url=memory://runs", "store.url: 'memory://runs' is gone when its process ends; give a folder, or one"),
    ("store.url=s4://runs", "store.url: 's4://runs': there is no kind of store s4://. Known are folders, and s3,"),
    ("rl.learning_rate=-1", "rl.optimizer.learning_rate: must be above 0 (found -1)"),
    ("rl.max_staleness=-1", "rl.rollout.max_staleness: must be at least 0 (found -1)"),
    ("rl.learning_rate=1e10", "rl.optimizer.learning_rate: must be at most 1 (found 10000000000)"),
    ("rl.temperature=1e300", "Override 'rl.temperature=1e300': the number 1e300 is too large for any setting."),
    ("rl.sampler.replicas=5000", "rl.sampler.replicas: must be at most 1024 or 'auto' (found 5000)"),
    ("rl.num_steps=9000000000000000000", "Override 'rl.num_steps=9000000000000000000': the number"),
    ("rl.betas=[0.9,1]", "rl.optimizer.betas.1: must be below 1 (found 1)"),
    ("rl.filters=[{name: length, options: {lowest: 2, highest: 1}}]", "filter length: lowest 2 is above highest 1"),
    ("rl.filters=[mean_reward]", "rl.rollout.filters.0: The filter 'mean_reward' needs an option, or it would"),
    ("rl.over_sampling=8", "rl: over_sampling 8 is below prompts_per_step 32; raise it, or"),
    ("base.schedule.warmup_fraction=0.8", "base.schedule: warmup_fraction 0.8 + decay_fraction 0.5 exceed 1;"),
    ("store.url=ftp://", "store.url: 'ftp://' names no place after ftp://; give one, as in s3://bucket/folder"),
    ("store.url=''", "store.url: must not be empty (found '')"),
    ("store.url=~nobody-here/x", "The path '~nobody-here/x' names a user that there is not; write the folder out."),
    ("store.url=a #1", "Override 'store.url=a #1': what follows ` #` is a comment in YAML; put the value in"),
    ("seed", "Override 'seed' is not of the form name=value, as in rl.learning_rate=2e-6."),
    ("seed=[1", "Override 'seed=[1': not YAML: did not find expected ',' or ']'."),
    ("seed={a: 1, a: 2}", "Override 'seed={a: 1, a: 2}': the key 'a' stands twice, first in line 1; keep one."),
    ("preset=two", "Override 'preset=two': a preset is chosen with --preset."),
    ("rl.reward_timeout_s=1e-9", "rl.rollout.reward_timeout_s: must be at least 0.01 (found 1e-09)"),
    ("rl.samples_per_prompt=5000", "rl: samples_per_prompt 5000 is above 4096, the most that a sampler takes"),
    ("base.zero_stage=true", "base.zero_stage: must be a whole number (found true)"),
    ("stages=5", "Override 'stages=5': `stages` must be a table of stages; found 5."),
])  # fmt: skip
def test_one_line_names_the_field_the_value_and_the_way_out(file, override, said):
    assert said in refusal(file, override)


@pytest.mark.parametrize(("override", "message"), [
    ("unchecked=[rl.temprature]",
     "unchecked: there is no setting 'rl.temprature'. Did you mean 'rl.rollout.temperature'?"),
    ("rl.lora_save=adapter",
     "rl: lora_save adapter means nothing with lora_rank 0; leave it out, or change the latter"),
    ("base.lora_save=adapter", "base: optimizer.lora_save means nothing without optimizer.lora_rank; leave it out"),
    ("rl.router_replay=true", "rl.rollout.router_replay: true, but the model has no experts; omit it."),
    ("rl.lora_rank=129",  # 128 is none
     "rl.optimizer.lora_rank: 129 is above 128, the width of the model, so adapters would be larger than what they "
     "adapt; lower it."),
    ("rl={kind: sft, prompts_per_step: 1, samples_per_prompt: 2, max_staleness: 1, advantage: grpo, sync: disk}",
     "rl: a stage of kind sft has no keys prompts_per_step, samples_per_prompt, max_staleness, advantage and "
     "1 other; they are keys of kind rl"),
    ("base.data=[{weight: -1}]",
     "p.yaml, preset 'one', cannot be used:\n  base.data.0.url: is missing\n"
     "  base.data.0.weight: must be above 0 (found -1)"),
])  # fmt: skip
def test_one_fault_is_said_once_and_two_are_two_lines(file, override, message):
    assert refusal(file, override) == message


@pytest.mark.parametrize(("override", "said"), [
    ("dpo.loss={name: ipo, options: {beta: 0}}", "beta 0 would learn nothing, or the rejected answers; set it above 0"),
    ("dpo.loss={name: dpo, options: {beta: -0.1}}", "beta -0.1 would learn nothing, or the rejected answers"),
    ("pairs.best=3", "best 3 keeps single answers, and pairs: best_worst makes pairs; leave one out"),
    ("pairs.pairs=none", "stage pairs has pairs: none; kinds preference and reward_model train on pairs, others on"),
    ("sft={inputs: {model: pretrain, conversations: pairs}, data: [{url: 'input:conversations', held_out: 0.1}]}",
     "stage pairs has pairs: best_worst; kinds preference and reward_model train on pairs, others on the best answers"),
    ("rl_on_model.reward='model:input:'", "or input:NAME, an input of the stage"),
    ("rl_on_model.reward=auto", "inputs.reward_model judges nothing; say reward: model:input:reward_model"),
])  # fmt: skip
def test_preferences_that_mean_nothing_are_refused(override, said):
    with pytest.raises(ConfigError) as caught:
        resolve(PROJECT / "pipeline.yaml", "preferences", (override,), machine=machine_of("cpu:2:avx2:8GiB"))
    assert said in str(caught.value)


def test_adapters_may_be_as_wide_as_the_model(file):
    assert resolve(file, "one", ["rl.lora_rank=128"])


@pytest.mark.parametrize(("text", "said"), [
    ("", "p.yaml is empty, or no table; it needs a table `presets` (see nanodag's pipeline.yaml)."),
    ("presets: [", "p.yaml, line 2: not YAML: did not find expected node content."),
    ("presets: {}", "p.yaml has no table `presets`; see the pipeline.yaml that comes with nanodag."),
    ("presets:\n  one: {}\n  one: {}", "p.yaml, line 3: the key 'one' stands twice, first in line 2; keep one."),
    ("presets: {one: }", "p.yaml: the preset 'one' must be a table with `stages`; found nothing."),
    ("presets: {one: {extends: 5}}", "p.yaml: `extends` of the preset 'one' must be the name of another; found 5."),
    ("presets: {one: {extends: two}}", "p.yaml has no preset 'two', which 'one' extends; it has one."),
    ("presets: {one: {sever: {}}}", "p.yaml: the preset 'one' has a key 'sever' that means nothing. Did you mean"),
    ("presets: {one: {stages: [x]}}", "p.yaml: `stages` in the preset 'one' must be a table of stages; found"),
    ("presets: {one: {stages: {a: 5}}}", "p.yaml: `stages` in the preset 'one': the stage 'a' must be a table,"),
    ("sore: {}\npresets: {one: {}}", "p.yaml has a key 'sore' that means nothing. Did you mean 'store'?"),
    ("default: 5\npresets: {one: {}}", "p.yaml: default must be the name of a preset; found 5."),
    ("a: &a {b: {c: *a}}", "p.yaml, line 1: *a stands within what it names, &a, and would contain itself."),
    ("a: *b", "p.yaml, line 1: there is no &b above for *b."),
    ("a: " + "[" * 3000, "p.yaml, line 1: nested deeper than 50."),
    ("a: " + "{b: " * 3000, "p.yaml, line 1: nested deeper than 50."),
    ("a: !!python/object/apply:os.system [ls]", "p.yaml, line 1: the tag !!python/object/apply:os.system means"),
    ("{[a]: b}", "p.yaml, line 1: a table or list cannot be a key; braces in text need quotes."),
    ("a: 1\n---\nb: 2", "p.yaml, line 2: a second document (`---`) begins; a pipeline file is one."),
    ('a: "\\0"', "p.yaml, line 1: a text holds the character U+0000, which no name or path may."),
    ("a:\n	b: 1", "p.yaml, line 2: not YAML: found character that cannot start any token."),
])  # fmt: skip
def test_a_broken_file_is_refused_with_its_line(file, text, said):
    file.write_text(text)
    assert said in refusal(file)


@pytest.mark.parametrize(("content", "said"), [
    ("presets: {é: {}}".encode("latin-1"), "p.yaml is not UTF-8: byte 0xe9 at position 10. Save it as UTF-8."),
    ("presets: {}".encode("utf-16"), "p.yaml is not UTF-8: byte 0xff at position 0. Save it as UTF-8."),
    (b"presets: {a: \x01}", "p.yaml, line 1: not YAML: it holds the character U+0001."),
    (b"#" * (1 << 21), "p.yaml has 2,097,152 bytes; a pipeline file has at most 1,048,576."),
])  # fmt: skip
def test_what_is_no_text_is_refused(file, content, said):
    file.write_bytes(content)
    assert refusal(file) == said


def test_what_is_no_file_is_refused(tmp_path):
    assert refusal(tmp_path / "nowhere.yaml") == "There is no pipeline file nowhere.yaml. Name one with --file."
    (tmp_path / "folder").mkdir()
    assert refusal(tmp_path / "folder") == "folder is a folder; name the pipeline file in it with --file."


def test_a_file_of_bombs_is_refused_at_once_and_in_little_memory(file):
    """Nine levels of nine aliases each: 387 million values in 500 bytes."""
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    file.write_text("\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *levels]))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert refusal(file) == "p.yaml, line 6: more than 100,000 values, those that aliases stand for counted."
    assert time.process_time() - began < 2 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_keys_beside_the_presets_are_common_to_all_and_a_preset_says_otherwise(file):
    text = file.read_text()
    file.write_text(f"store: {{url: elsewhere}}\nserver: {{port: 5000}}\nseed: 7\n{text}")
    found = resolve(file, "one")
    assert (found.pipeline.store.url, found.pipeline.server.port) == (str(file.parent / "elsewhere"), 5000)
    assert (found.pipeline.seed, found.pipeline.stages["rl"].seed) == (7, 7)
    assert found.origins["seed"] == found.origins["server.port"] == "the file, for all presets"
    file.write_text(file.read_text().replace("one:\n", "one:\n    seed: 8\n    server: {start_timeout_s: 9}\n", 1))
    found = resolve(file, "one")
    assert (found.pipeline.seed, found.pipeline.server.port, found.pipeline.server.start_timeout_s) == (8, 5000, 9)
    assert found.origins["seed"] == "preset one"
    assert resolve(file, "one", ["seed=9"]).pipeline.seed == 9


def test_an_agents_command_is_a_list(file):
    generate = resolve(file, "one", ["rl.generate={name: agent, options: {command: [python, agent.py]}}"])
    assert generate.pipeline.stages["rl"].rollout.generate.options == {"command": ("python", "agent.py")}


@pytest.mark.parametrize(("stages", "said"), [
    (STAGES | {f"t{n}": STAGES["tokenizer"] for n in range(9000)}, "stages: 9,003 are more than 1,000, the most "),
    (STAGES | {"rl": STAGES["rl"] | {f"key{n}": n for n in range(20_000)}}, "rl: a stage of kind rl has no keys "),
    (STAGES | {"rl": STAGES["rl"] | {"sampler": {f"key{n}": n for n in range(20_000)}}}, "cannot be used:"),
    (STAGES | {"rl": STAGES["rl"] | {"template_options": {f"key{n}": n for n in range(20_000)}}}, ""),
])  # fmt: skip
def test_a_file_of_thousands_of_stages_or_keys_ends(file, stages, said):
    """Each took minutes when the work grew with the square of the number."""
    file.write_text(json.dumps({"presets": {"one": {"stages": stages}}}))
    began = time.process_time()
    if said:
        assert said in refusal(file)
    else:
        assert len(resolve(file, "one").pipeline.stages["rl"].rollout.template_options) == 20_000
    assert time.process_time() - began < 40


SHIPPED = (PROJECT / "pipeline.yaml").read_text()
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))  # of each kind
# What is special in YAML, and in a pipeline file; a fuzzer's own letters rarely meet it.
PIECES = [
    *("&a ", "*a", "<<: ", "- ", ": ", "\n", "\n  ", "\n    ", "{", "}", "[", "]", ",", "? ", "|", ">", "#", '"', "'"),
    *("!!int ", "!x ", "!!python/object:os.system ", "---\n", "...\n", "%YAML 1.1\n", "\t", "\0", "\x85", "\ufeff"),
    *("presets", "one", "stages", "extends", "default", "inputs", "kind", "rl", "store", "url", "data", "drop", "null"),
    *("true", "1e999", "0x", "010", ".nan", "~", "9" * 30, "-1", "reward", "sampler", "unchecked", "shape", "auto"),
]


def test_the_shipped_file_means_what_it_means_to_pyyaml():
    assert parse_yaml(SHIPPED, str) == yaml.safe_load(SHIPPED)


@pytest.mark.parametrize(("text", "value"), [
    *(("12", 12), ("-12", -12), ("0o17", 15), ("0x1F", 31), ("0", 0)),
    *(("1.5", 1.5), (".5", 0.5), ("5.", 5.0), ("2e-6", 2e-6), ("1e-300", 1e-300), ("-.inf", float("-inf"))),
    *(("1e6", 1_000_000), ("1.5e3", 1500), ("1000.0", 1000.0)),
    *(("true", True), ("False", False), ("~", None), ("", None), ("NULL", None)),
    *(("yes", "yes"), ("on", "on"), ("1:30", "1:30"), ("1_000", "1_000"), ("2026-11-22", "2026-11-22")),
    *(("'12'", "12"), ('"true"', "true"), ("!!str 12", "12"), ("!!float 3", 3.0), ("! 12", "12")),
    ("{1: a, yes: b, null: c}", {"1": "a", "yes": "b", "null": "c"}),
    ("- &x {a: 1, b: 2}\n- {<<: *x, b: 3}", [{"a": 1, "b": 2}, {"a": 1, "b": 3}]),
    ("- &x {a: 1}\n- &y {a: 2, b: 2}\n- {<<: [*x, *y]}", [{"a": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 2}]),
])  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = parse_yaml(text, str)
    assert found == value and type(found) is type(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-LARGEST, LARGEST) | st.floats(-LARGEST, LARGEST),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4),
        max_leaves=20,
    )
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_json_is_read_as_json(value):
    assert parse_yaml(json.dumps(value), str) == value


def refused_or_read(path, content, overrides=()):
    began = time.process_time()
    path.write_bytes(content)
    try:
        resolve(path, "auto", overrides)
    except ConfigError as error:
        assert len(str(error)) < 4000, "a message that nobody reads"
    assert time.process_time() - began < 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "p.yaml"


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=60))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_text_gives_a_traceback_or_a_hang(path, pieces):
    refused_or_read(path, "".join(pieces).encode("utf-8", "surrogatepass"))


@given(st.integers(0, len(SHIPPED)), st.integers(0, 80), st.lists(st.sampled_from(PIECES), max_size=4))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_no_slip_in_the_shipped_file_gives_a_traceback_or_a_hang(path, start, length, pieces):
    refused_or_read(path, (SHIPPED[:start] + "".join(pieces) + SHIPPED[start + length :]).encode())


PIPELINE = json.dumps({"default": "one", "presets": {"one": {"stages": STAGES}}}).encode()


@pytest.fixture(scope="module")
def fields(path):
    """Dotted names of all that a pipeline has, and of some tables."""
    path.write_bytes(PIPELINE)
    names = [name for name, _ in leaves(resolve(path, "one").pipeline) if name != "preset"]
    return [*names, "store", "server", "nightly", "rl", "rl.sampler", "base.shape", "stages", "rl.inputs"]


VALUES = [
    None, True, -1, 0, 1e300, 10**18, 10**15, 1e14, 2.5, "", "auto", "none", "x:y", "file:", [], {}, [[]], {"a": []},
    ["auto"],
]  # fmt: skip


@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_no_value_of_any_field_gives_a_traceback_or_a_hang(path, fields, data):
    chosen = data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=2))
    overrides = [f"{name}={json.dumps(data.draw(st.sampled_from(VALUES)))}" for name in chosen]
    refused_or_read(path, PIPELINE, overrides)


@pytest.mark.parametrize("piece", ["[", "{", "- ", "? ", "a: ", "&a ", "a: b\n", "- a\n", "!!x ", "'", "|\n", "#\n"])
def test_the_largest_file_of_one_piece_is_read_or_refused_within_2_s(path, piece):
    refused_or_read(path, (piece * (MAX_BYTES // len(piece))).encode())


def test_a_value_lies_in_at_most_49_lists():
    assert parse_yaml("[" * 49 + "1" + "]" * 49, str)
    with pytest.raises(ConfigError, match="nested deeper than 50"):
        parse_yaml("[" * 50 + "1" + "]" * 50, str)


def test_each_check_of_an_rl_stage_has_a_sentence_and_each_sentence_a_check():
    in_loops = set(re.findall(r'_said\(stage, "(\w+)"', inspect.getsource(rl_checks)))
    assert rl_checks.sentences().keys() == rl_checks.CHECKS.keys() | rl_checks.REWARDS.keys() | in_loops
