"""The sampler's own forward pass against transformers' on random models of all types."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sampler.reference import make_engine, reference_logprobs, request

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4], [100, 149, 50], [11] * 90]
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True}),
    ("llama", {"rope_parameters": LINEAR_ROPE}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "vocab_size": 128}),
    ("qwen3", {"attention_bias": True}),
    ("qwen2", {"rope_parameters": YARN_ROPE, "hidden_size": 64}),
    ("smollm3", {"no_rope_layer_interval": 2, "hidden_size": 64}),  # heads as wide as the compiled code wants
    ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True, "use_sliding_window": True, "sliding_window": 9}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 11}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 80, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 0}),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kind", "config"), VARIANTS)
def test_logprobs_of_a_ragged_batch_equal_those_of_transformers(make_checkpoint, kind, config, deterministic):
    folder = make_checkpoint(kind, **config)
    engine = make_engine(folder, max_batch=3, deterministic=deterministic)
    prompts = [[token % engine.checkpoint.architecture.vocab_size for token in prompt] for prompt in PROMPTS]
    requests = [request(prompt, max_new_tokens=70, temperature=0.8, n=2) for prompt in prompts]
    for prompt, completions in zip(prompts, engine.generate(requests), strict=True):
        for completion in completions:
            assert len(completion.output_ids) == 70
            expected = reference_logprobs(folder, prompt, completion.output_ids, temperature=0.8)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "smollm3"])
def test_greedy_tokens_equal_those_of_transformers(make_checkpoint, kind):
    folder = make_checkpoint(kind, **({"no_rope_layer_interval": 2} if kind == "smollm3" else {}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests = [request(prompt, max_new_tokens=40, temperature=0.0, ignore_eos=False) for prompt in PROMPTS]
    completions = make_engine(folder).generate(requests)
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        ids, greedy = torch.tensor([prompt]), {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        assert completion.output_ids == generated[0, len(prompt) :].tolist()
        expected = reference_logprobs(folder, prompt, completion.output_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_bfloat16_logprobs_are_as_close_to_the_truth_as_those_of_transformers(make_checkpoint):
    # Wide enough that every matrix is multiplied in bfloat16.
    folder = make_checkpoint("qwen3", hidden_size=256, head_dim=64, intermediate_size=512, initializer_range=0.05)
    engine = make_engine(folder, dtype="bfloat16")
    layer = engine.model.weights.layers[0]
    assert {matrix.dtype for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)} == {torch.bfloat16}
    (completions,) = engine.generate([request(PROMPTS[0], max_new_tokens=100, n=8)])
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours, theirs = [], []
    for completion in completions:
        truth = reference_logprobs(folder, PROMPTS[0], completion.output_ids)
        with torch.no_grad():
            logits = rounded(torch.tensor([PROMPTS[0] + completion.output_ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
        bf16 = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(completion.output_ids)[:, None])[:, 0]
        ours.append(np.abs(completion.logprobs - truth).mean())
        theirs.append(np.abs(bf16.numpy() - truth).mean())
    assert np.mean(ours) < 1.2 * np.mean(theirs)


def test_a_checkpoint_in_several_files_is_read_whole(make_model, tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "whole")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    names = ("sharded", "whole")
    sharded, whole = (make_engine(tmp_path / name).generate([request(sampling_seed=1)])[0][0] for name in names)
    assert sharded.output_ids == whole.output_ids
    assert sharded.logprobs == whole.logprobs
