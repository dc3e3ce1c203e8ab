"""docs/how-to/rl-algorithm.md says of every option of slime's script what `gsm8k-rl` has in its place."""

import re

import pytest
import yaml

from nanodag.config import resolve
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of

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
    resolved = resolve(PROJECT / "pipeline.yaml", "gsm8k-rl", machine=machine_of("4xH100"))
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
