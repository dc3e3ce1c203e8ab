"""Two servers of SGLang that share prompts: a killed one is replaced, and both have the right weights."""

import asyncio
import os
import signal

import pytest

from nanodag.engines.start import start_engine
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from tests.engines.samplers import with_samplers
from tests.guest_pythons import sglang_python
from tests.rl.models import save_tiny_model
from tests.rl.stages import make_job, metrics, start

START_S = 1500
CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def python():
    return sglang_python()


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_two_sglang_servers_outlive_kills_and_have_the_right_weights(model, tmp_path, python):
    other = save_tiny_model(tmp_path / "other", seed=5)

    def launch(number, path, version):
        settings = EngineSettings(
            engine="sglang",
            python=str(python),
            dtype="float32",
            max_batch=8,
            context_length=CONTEXT // 2,
            memory_fraction=0.1,
            start_timeout_s=START_S,
        )
        return start_engine(settings.of_replica(0, path, version), log_path=tmp_path / f"log-{number}")

    def asked(count):
        params = SamplingParams(n=2, max_new_tokens=60, temperature=0.0, ignore_eos=True)
        return [Request(input_ids=[1, 2, n], params=params, rid=f"r{n}") for n in range(count)]

    async def versions_of_answers(samplers):
        groups = await asyncio.gather(*(samplers.generate([request]) for request in asked(6)))
        assert all(len(group) == 2 and all(len(c.output_ids) == 60 for c in group) for (group,) in groups)
        return {c.weight_version for (group,) in groups for c in group}

    async def work(samplers, servers):
        assert await versions_of_answers(samplers) == {"0"}
        await samplers.update_weights_from_disk(str(other), 1)
        assert await versions_of_answers(samplers) == {"1"}
        step = asyncio.ensure_future(versions_of_answers(samplers))
        await asyncio.sleep(0.1)
        os.kill(servers[1].pid, signal.SIGKILL)
        assert await step == {"1"}
        assert await samplers.versions() == ["1", "1"]  # the one that was started again, too
        assert samplers.num_restarts == 1
        assert await versions_of_answers(samplers) == {"1"}

    with_samplers(launch, model, work, health_every_s=0.2)


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_a_stage_with_two_sglang_servers_trains(tmp_path, python):
    sampler = {"engine": "sglang", "context": 64, "max_batch": 16, "replicas": 2, "memory_fraction": 0.1}
    job = make_job(tmp_path, sampler=sampler)
    process = start(job, fresh=True)
    code = process.wait(timeout=START_S)
    log = (job.workspace / "worker.log").read_text()
    assert code == 0, log[-6000:]
    assert [line["step"] for line in metrics(job)] == [1, 2]
