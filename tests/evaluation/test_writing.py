"""Which samplers write an evaluation's answers, and that SGLang's write what the embedded one does."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from nanodag.config.kinds.evaluation import EvalSamplerConfig
from nanodag.evaluation import writing
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.writing import SamplerSettings, start_sampler
from nanodag.inference.engine_install import engine_environment
from nanodag.inference.protocol import Request, SamplingParams
from tests.evaluation.tiny import ONE_EMBEDDED, asked_by

SGLANG = engine_environment("cpu")


def test_sglang_servers_have_gpus_of_their_own_and_an_amount_of_cache(models, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    monkeypatch.setenv("NANODAG_SGLANG_PYTHON", sys.executable)
    # 2 layers of 2 heads of 8 numbers, keys and values, 2 bytes each: 128 bytes a token
    config = EvalSamplerConfig(
        engine="sglang", replicas=8, max_batch=16, cache_bytes=128 * 5000, tensor_parallel=2, options={"x": 1}
    )
    settings = SamplerSettings(folder=models["qwen3"], precision="bf16", device="cuda", threads=8, config=config)
    found = []

    def start(given, log_path):
        found.append(given)
        return SimpleNamespace(url="http://x", stop=lambda: None)

    monkeypatch.setattr(writing, "start_engine", start)
    writer = start_sampler(settings, context=64, flops=1.0)
    writer.close()
    assert (writer.context, writer.num_replicas) == (192, 2), "the model's positions; two of five GPUs each"
    assert sorted(given.gpus for given in found) == ["0,1", "2,3"]
    for given in found:
        assert (given.context_length, given.cache_tokens, given.max_batch) == (192, 5000, 16)
        assert given.options == {"skip-tokenizer-init": False, "x": 1} and given.dtype == "bfloat16"


def test_an_evaluation_whose_sampler_is_killed_goes_on_and_writes_the_same(models, monkeypatch):
    monkeypatch.setattr(writing, "REPLICA_FLOPS", 1.0)
    config = EvalSamplerConfig(engine="embedded", replicas=2, max_batch=4, cache_bytes=1 << 24)
    settings = SamplerSettings(folder=models["qwen3"], precision="fp32", device="cpu", threads=2, config=config)
    params = {"max_new_tokens": 150, "ignore_eos": True}
    requests = [
        Request(input_ids=[5, number], params=SamplingParams(sampling_seed=number, **params), return_logprob=False)
        for number in range(40)
    ]
    writer = start_sampler(settings, context=192, flops=10.0)
    victims = [replica.server.pid for replica in writer.fleet.replicas]

    def written(num_killed):
        answers = {}

        def on_written(number, completion):
            if len(answers) < num_killed:  # the others are under way
                os.kill(victims[len(answers)], signal.SIGKILL)
            assert number not in answers
            answers[number] = completion.output_ids

        writer.write(requests, on_written)
        return answers

    try:
        assert writer.num_replicas == 2
        undisturbed = written(0)
        assert len(undisturbed) == 40 and written(2) == undisturbed
        assert written(0) == undisturbed and writer.fleet.num_restarts == 2
    finally:
        writer.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SGLANG.is_installed(SGLANG.folder), reason="SGLang for a CPU is not installed")
def test_two_sglang_servers_on_a_cpu_write_what_the_embedded_sampler_does(models):
    """A minute of CPU to start. The stop string is in the name of no special token: SGLang looks there, too."""
    config = EvalSamplerConfig(engine="sglang", replicas=2, max_batch=8, cache_bytes=1 << 20)
    prompts = [[5, 6, number, 8] for number in range(9, 33)]
    params = [
        SamplingParams(max_new_tokens=12, temperature=0.0, stop=("0",) if number % 3 == 0 else None)
        for number in range(len(prompts))
    ]
    answers = []
    for sampler in (ONE_EMBEDDED, config):
        model = EvaluatedModel(models["qwen3"], asked_by(max_new_tokens=12, sampler=sampler, threads=2))
        try:
            written = model.write(prompts, params)
            assert model._sampler.num_replicas == sampler.replicas
        finally:
            model.close()
        texts = [model._decode(ids) for ids, _ in written]
        answers.append([(text.split("0")[0] if n % 3 == 0 else text) for n, text in enumerate(texts)])
    assert answers[0] == answers[1] and len(set(answers[0])) > 12
