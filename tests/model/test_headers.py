"""What safetensors headers say: which parameters every token is multiplied with."""

import json

import numpy as np
from safetensors.numpy import save_file

from nanodag.model.headers import matrix_parameters, num_elements, tensor_shapes

SHAPES = {"model.embed_tokens.weight": (10, 4), "model.layers.0.mlp.weight": (4, 6), "model.norm.weight": (4,)}


def write(folder, shapes):
    folder.mkdir()
    index = {name: f"model-{number}.safetensors" for number, name in enumerate(shapes)}  # a file each
    for name, shape in shapes.items():
        save_file({name: np.zeros(shape, np.float32)}, folder / index[name])
    save_file({"a": np.zeros(7, np.float32)}, folder / "consolidated.safetensors")  # the same model in another form
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_a_tied_embedding_is_the_head_and_counts_once(tmp_path):
    folder = write(tmp_path / "tied", SHAPES)
    assert tensor_shapes(folder) == SHAPES and num_elements(SHAPES) == 40 + 24 + 4
    assert matrix_parameters(folder) == 40 + 24


def test_an_embedding_beside_a_head_does_not_count(tmp_path):
    assert matrix_parameters(write(tmp_path / "untied", {**SHAPES, "lm_head.weight": (10, 4)})) == 40 + 24
