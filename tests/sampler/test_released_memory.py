"""Memory that a sampler releases: it is free meanwhile, what needs it is refused, and the same tokens come after."""

import psutil
import pytest
import torch

from nanodag.engines.start import start_engine
from nanodag.errors import BadRequest
from nanodag.inference.engine_settings import EngineSettings
from tests.sampler.reference import make_engine, request, with_client

BOTH = ("weights", "kv_cache")
MIB = 1 << 20


def requests():
    return [request([1, n, 3], n=3, max_new_tokens=20, sampling_seed=n, ignore_eos=False) for n in (4, 9)]


def answers(engine):
    return [[(c.output_ids, c.logprobs) for c in group] for group in engine.generate(requests())]


@pytest.mark.parametrize(("deterministic", "threads"), [(True, 1), (False, 1), (False, 2)])
def test_after_release_and_resume_with_the_same_weights_the_same_tokens_come(make_checkpoint, deterministic, threads):
    folder = make_checkpoint("qwen3")
    torch.set_num_threads(threads)
    try:
        engine = make_engine(folder, dtype="float32", max_batch=8, context_length=64, deterministic=deterministic)
        expected = answers(engine)
        for order in (BOTH, BOTH[::-1]):
            engine.release_memory(BOTH)
            for tag in order:
                engine.resume_memory([tag])
                if tag == "weights":
                    engine.update_weights(engine.load(folder), folder, "2")
            assert answers(engine) == expected and not engine.released
    finally:
        torch.set_num_threads(1)


def test_what_needs_released_memory_is_refused(make_checkpoint):
    folder = make_checkpoint("qwen3")
    engine = make_engine(folder, dtype="float32", max_batch=8, context_length=64)
    weights = engine.load(folder)
    with pytest.raises(BadRequest, match="weights: not released"):
        engine.resume_memory(["weights"])
    engine.submit(requests()[0], lambda *unused: None)
    with pytest.raises(BadRequest, match="cannot be released: 3 samples need it"):
        engine.release_memory(BOTH)
    engine.abort(lambda running: True, "enough")
    engine.release_memory(BOTH)
    with pytest.raises(BadRequest, match="kv_cache and weights: released already"):
        engine.release_memory(BOTH)
    with pytest.raises(BadRequest, match="weights cannot be taken"):
        engine.update_weights(weights, folder, "2")
    engine.resume_memory(BOTH)
    with pytest.raises(BadRequest, match="others have not come yet"):
        engine.generate(requests())


def test_a_server_gives_its_memory_back_to_the_machine_and_says_how_much_it_holds(make_checkpoint, tmp_path):
    """By hand: 15.0 M parameters in float32 are 60 MB; the cache of 64 slots x 256 tokens x 4 heads x 64, keys and
    values of 2 layers in float32, is 67 MB once it is written to."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64, "num_key_value_heads": 4}
    folder = make_checkpoint("qwen3", **sizes, initializer_range=0.02)
    wanted = request([1, 2], n=64, max_new_tokens=250)

    async def work(client):
        held = psutil.Process(process.pid)
        await client.generate([wanted])
        full = held.memory_info().rss
        await client.release_memory(BOTH)
        empty = held.memory_info().rss
        assert not await client.health() and await client.health(generates=False)
        with pytest.raises(BadRequest, match="the memory of kv_cache and weights is released"):
            await client.generate([wanted])
        with pytest.raises(BadRequest, match="tags"):
            await client.release_memory(["cuda_graph"])
        said = await client.memory()
        assert abs(said["bytes"] - empty) < 8 * MIB and said["peak_bytes"] >= full - 8 * MIB
        await client.resume_memory(["weights"])
        await client.update_weights_from_disk(str(folder), 2)
        await client.resume_memory(["kv_cache"])
        assert await client.health()
        ((after, *_),) = await client.generate([wanted])
        assert len(after.output_ids) == 250 and after.weight_version == "2"
        assert full - empty > 0.95 * (60e6 + 67e6)

    settings = EngineSettings(model=folder, dtype="float32", max_batch=64, context_length=256)
    with start_engine(settings, log_path=tmp_path / "log") as process:
        with_client(process, work)
