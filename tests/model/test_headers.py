"""What safetensors headers say: which parameters every token is multiplied with."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from nanodag.errors import BadRequest, ConfigError
from nanodag.model.folder import load
from nanodag.model.headers import (
    head_parameters,
    matrix_parameters,
    num_elements,
    tensor_shapes,
    weight_files,
    weights_digest,
)
from nanodag.rl.control.model_facts import ModelFacts

SHAPES = {"model.embed_tokens.weight": (10, 4), "model.layers.0.mlp.weight": (4, 6), "model.norm.weight": (4,)}


def write(folder, shapes):
    folder.mkdir()
    index = {name: f"model-{number}.safetensors" for number, name in enumerate(shapes)}  # a file each
    for name, shape in shapes.items():
        save_file({name: np.zeros(shape, np.float32)}, folder / index[name])
    save_file({"a": np.zeros(7, np.float32)}, folder / "consolidated.safetensors")  # the same model in another form
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_an_embedding_counts_once_where_it_is_the_head_and_not_beside_one(tmp_path):
    folder = write(tmp_path / "tied", SHAPES)
    assert tensor_shapes(folder) == SHAPES and num_elements(SHAPES) == 40 + 24 + 4
    assert matrix_parameters(folder) == 40 + 24 and head_parameters(folder) == 40

    assert matrix_parameters(write(tmp_path / "untied", {**SHAPES, "lm_head.weight": (10, 4)})) == 40 + 24


def test_weights_are_told_apart_by_their_content_and_by_nothing_else(tmp_path):
    digests = []
    for name, value in (("one", 0.5), ("same", 0.5), ("other", 0.25)):
        weights = np.zeros((3000, 1000), np.float32)  # 12 MB, of which a third is read
        weights[1500:] = value
        (tmp_path / name).mkdir()
        save_file({"w": weights}, tmp_path / name / "model.safetensors")
        digests.append(weights_digest(tmp_path / name))
    (tmp_path / "same" / "README.md").write_text("again")
    assert digests[0] == digests[1] == weights_digest(tmp_path / "same") != digests[2]


CONFIG = {
    **{"model_type": "qwen3", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 8},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("read", [load, ModelFacts.read])
def test_a_folder_without_safetensors_is_the_configs_fault_for_a_stage_and_a_bad_request_for_a_sampler(tmp_path, read):
    with pytest.raises(ConfigError, match=r"config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors"):
        read(tmp_path)
    with pytest.raises(BadRequest, match=r"holds neither model\.safetensors"):
        weight_files(tmp_path)
