"""lm-eval's own clients of an OpenAI API score a served model as our evaluation scores it, item by item."""

import json

import httpx
import pytest
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.engines.start import start_engine
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.harness import run_benchmark
from nanodag.inference.engine_settings import EngineSettings
from tests.api.real_engines import fleet_over
from tests.api.scripted import app_of, model_of
from tests.chat.fake_api import serving
from tests.evaluation.tiny import POSITIONS, asked_by

pytestmark = pytest.mark.slow
WORDS = [
    *("the cat", "a dog and", "on the mat", "sat", "ran after the"),
    *("the dog", "cat the", "and the mat", "after", "on"),
]
NEW = 12


@pytest.fixture(scope="module")
def url(model_folder):
    settings = EngineSettings(model=model_folder, token="t", max_batch=4)
    with start_engine(settings, log_path=model_folder / "log") as process:
        engines = fleet_over(process, model_folder, "t")
        app = app_of(model_of(model_folder, engines, context=POSITIONS))
        begun = []

        async def begins(scope, receive, send):
            if not begun:
                begun.append(await engines.start(1))  # in the server's own event loop
            if scope["path"] == "/end":
                await engines.end()
            await app(scope, receive, send)

        with serving(begins) as port:
            yield f"http://127.0.0.1:{port}/v1"
            httpx.get(f"http://127.0.0.1:{port}/end", trust_env=False)


def outside(kind, url, model_folder, **how):
    client = kind(
        base_url=url, model="tiny", tokenizer=str(model_folder), tokenizer_backend="huggingface",
        max_length=POSITIONS, max_gen_toks=NEW, num_concurrent=1, **how,
    )  # fmt: skip
    client.switch_template = lambda switches: None
    return client


@pytest.fixture
def records(tmp_path):
    """records(model, lines, ...): what `run_benchmark` wrote of each item."""

    def of(model, lines, *, adapter, chat=False, **benchmark):
        path = tmp_path / "items.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = BenchmarkConfig(source={"url": f"file:{path}", "adapter": adapter}, **benchmark)
        result = run_benchmark(model, config, chat=chat, seed=0, mirror="", folder=tmp_path)
        return result.records

    return of


@pytest.fixture
def ours(model_folder):
    model = EvaluatedModel(model_folder, asked_by(micro_batch_tokens=96, max_new_tokens=NEW))
    yield model
    model.close()


def test_choices_are_scored_alike_by_completions(records, ours, model_folder, url):
    choices = {"text": ["sat on", "ran", "the mat", "dog"], "label": ["A", "B", "C", "D"]}
    items = [{"question": words, "choices": choices, "answerKey": "ABCD"[n % 4]} for n, words in enumerate(WORDS)]
    theirs = outside(LocalCompletionsAPI, f"{url}/completions", model_folder, batch_size=4, add_bos_token=True)
    expected = records(ours, items, adapter="auto", name="arc_easy")
    found = records(theirs, items, adapter="auto", name="arc_easy")
    assert len(found) == len(items) and [one["scores"] for one in found] == [one["scores"] for one in expected]
    for mine, its in zip(expected, found, strict=True):
        assert its["logprobs"] == pytest.approx(mine["logprobs"], abs=1e-3)


@pytest.mark.parametrize("chat", [False, True])
def test_answers_are_written_alike(records, ours, model_folder, url, chat):
    items = [{"question": words, "answer": "the"} for words in WORDS]
    kind, path = (LocalChatCompletion, "chat/completions") if chat else (LocalCompletionsAPI, "completions")
    theirs = outside(kind, f"{url}/{path}", model_folder, **({} if chat else {"add_bos_token": True}))
    expected = records(ours, items, adapter="problem", name="p", form="problems", chat=chat)
    found = records(theirs, items, adapter="problem", name="p", form="problems", chat=chat)
    assert [one["output"] for one in found] == [one["output"] for one in expected]
    assert [one["scores"] for one in found] == [one["scores"] for one in expected]
    assert len({one["output"] for one in found}) > len(items) / 2
