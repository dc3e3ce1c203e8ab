"""Published models name what begins, ends and pads a text, so that transformers, sampler, evaluation and API stop."""

import json

import pytest
import torch
from transformers import GenerationConfig, pipeline

from nanodag.config.dial import Shape
from nanodag.config.pipeline import read_stage
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.model.architecture import read_checkpoint
from nanodag.model.build import qwen3_architecture
from nanodag.model.decoder import Decoder
from nanodag.model.folder import save
from nanodag.model.import_model import import_model
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.layout import BOS, END, PAD, SPECIAL_TOKENS
from nanodag.worker.job import Job
from tests.evaluation.tiny import asked_by

SHAPE = Shape(depth=1, width=16, num_heads=2, num_kv_heads=1, head_width=8, mlp_width=16, tied_embeddings=False)
SIZE = 256 + len(SPECIAL_TOKENS)
IDS = {name: 256 + number for number, name in enumerate(SPECIAL_TOKENS)}
TURNS = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"


def save_one_that_says_a(folder, end):
    """A model that says `a`, then the token `end`, and so on for ever."""
    save_tokenizer({bytes([value]): value for value in range(256)}, folder / "tokenizer")
    model = Decoder(qwen3_architecture(SHAPE, vocabulary=SIZE, rope_theta=10_000.0, max_positions=64))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(name.endswith("norm.weight")))  # no layer adds anything
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[ord("a")] = torch.eye(16)[1]
        model.lm_head.weight[ord("a"), 0] = model.lm_head.weight[IDS[end], 1] = 9.0
    weights = dict(model.named_parameters())
    save(folder / "model", weights, tokenizer=folder / "tokenizer", model=model)
    return folder / "model"


@pytest.mark.parametrize("end", [END, BOS])
def test_a_published_model_stops_in_transformers(tmp_path, end):
    folder = save_one_that_says_a(tmp_path, end)
    written = pipeline("text-generation", model=str(folder), device="cpu")
    asked = [{"role": "user", "content": "Hi"}]
    assert written(asked, max_new_tokens=9, return_full_text=False)[0]["generated_text"] == "a"
    assert written("Hi", max_new_tokens=9, return_full_text=False)[0]["generated_text"] == "a"
    config, ids = json.loads((folder / "config.json").read_text()), [IDS[END], IDS[BOS]]
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [IDS[BOS], ids, IDS[PAD]]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ids


def test_an_imported_model_keeps_its_ends_and_gets_that_of_its_chat_template(tmp_path):
    folder = save_one_that_says_a(tmp_path, END)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"eos_token": PAD, "chat_template": TURNS}  # as base models have it: eos is not the end of a turn
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    begun = {"eos_token_id": 5, "temperature": 0.6, "_from_model_config": True}
    (folder / "generation_config.json").write_text(json.dumps(begun))
    config = read_stage({"kind": "import", "model": f"file:{folder}"})
    job = Job(name="start", run="r", config=config, inputs={}, workspace=tmp_path / "work")
    job.workspace.mkdir()
    import_model(job)
    ends = [5, IDS[END], IDS[PAD], IDS[BOS]]
    made = json.loads((job.output / "generation_config.json").read_text())
    assert made == {"eos_token_id": ends, "temperature": 0.6, "bos_token_id": IDS[BOS], "pad_token_id": IDS[PAD]}
    assert read_checkpoint(job.output).eos_token_ids == tuple(ends)
    assert load_renderer(job.output).stop_ids == (IDS[END], IDS[PAD], IDS[BOS], 5)
    evaluated = EvaluatedModel(job.output, asked_by(max_new_tokens=8))
    assert evaluated._stop_ids == sorted(ends)
