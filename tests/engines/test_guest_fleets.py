"""Two servers of SGLang, or of vLLM, that share prompts: a killed one is replaced, both have the right weights."""

import asyncio
import os
import signal

import pytest

from nanodag.children.tree import descendants
from nanodag.engines.start import start_engine
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.protocol import Request, SamplingParams
from tests.engines.samplers import with_samplers
from tests.fault.processes import alive, wait_until
from tests.guest_pythons import sglang_python, vllm_python
from tests.rl.models import save_tiny_model
from tests.rl.stages import make_job, metrics, slow_rewards, start

START_S = 1500
CONTEXT = 256


HEADS = 32  # the least width that vLLM's attention has on a CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), head_dim=HEADS)


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def engine(request):
    """Its name, and settings of a server."""
    python = {"sglang": sglang_python, "vllm": vllm_python}[request.param]()
    return request.param, {"engine": request.param, "python": str(python)}


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_two_servers_outlive_kills_and_have_the_right_weights(model, tmp_path, engine):
    other = save_tiny_model(tmp_path / "other", seed=5, head_dim=HEADS)

    def launch(number, path, version):
        settings = EngineSettings(
            **engine[1],
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
        for number, victim in enumerate((servers[1].pid, list(descendants(servers[0].pid))[-1])):  # and a worker
            step = asyncio.ensure_future(versions_of_answers(samplers))
            await asyncio.sleep(0.1)
            os.kill(victim, signal.SIGKILL)
            assert await step == {"1"}
            assert await samplers.versions() == ["1", "1"]  # the one that was started again, too
            assert samplers.num_restarts == number + 1
        assert await versions_of_answers(samplers) == {"1"}

    with_samplers(launch, model, work, health_every_s=0.2)


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("sync", ["disk", "distributed", "ipc"])
def test_a_stage_with_two_servers_trains_on_what_they_said_of_its_own_weights(tmp_path, engine, sync):
    sampler = {"engine": engine[0], "context": 64, "max_batch": 16, "replicas": 2, "memory_fraction": 0.1}
    job = make_job(tmp_path, head_dim=HEADS, sampler=sampler, weights={"sync": sync}, num_steps=3)
    process = start(job, fresh=True)
    code = process.wait(timeout=START_S)
    log = (job.workspace / "worker.log").read_text()
    assert code == 0, log[-6000:]
    lines = metrics(job)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["mismatch_absolute"] < 1e-4 for line in lines), [line["mismatch_absolute"] for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_vllm_answers_with_the_adapters_that_a_stage_gives_it_alone(tmp_path):
    vllm_python()
    sampler = {"engine": "vllm", "context": 64, "max_batch": 16, "replicas": 1, "memory_fraction": 0.1}
    weights = {"sync": "disk", "lora_sync": "adapter"}
    job = make_job(tmp_path, head_dim=HEADS, sampler=sampler, weights=weights, num_steps=3, lora_rank=4)
    process = start(job, fresh=True)
    code = process.wait(timeout=START_S)
    assert code == 0, (job.workspace / "worker.log").read_text()[-6000:]
    lines = metrics(job)
    assert all(line["mismatch_absolute"] < 1e-4 for line in lines) and len(lines) == 3


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_a_killed_stage_leaves_no_server_behind_and_goes_on_where_it_was(tmp_path, engine):
    sampler = {"engine": engine[0], "context": 64, "max_batch": 16, "replicas": 1, "memory_fraction": 0.1}
    job = make_job(tmp_path, head_dim=HEADS, sampler=sampler, num_steps=5)
    slow_rewards(tmp_path)
    process = start(job, fresh=True)
    wait_until(lambda: (job.workspace / "metrics.jsonl").exists() and len(metrics(job)) > 1, START_S)
    below = list(descendants(process.pid))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(below), 30)
    assert start(job, fresh=True).wait(timeout=START_S) == 0
    assert [line["step"] for line in metrics(job)] == [1, 2, 3, 4, 5]
