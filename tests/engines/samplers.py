"""Several samplers, what is asked of them, and which processes they are."""

import asyncio
from pathlib import Path

from nanodag.engines.fleet import Fleet
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Request, SamplingParams
from tests.server_info import server_info


def requests(count):
    """Groups of 40 samples of 100 tokens, each with a seed of its own."""
    params = {"n": 40, "max_new_tokens": 100, "ignore_eos": True}
    return [
        Request(input_ids=[1, 2, n], params=SamplingParams(sampling_seed=n, **params), rid=f"r{n}")
        for n in range(count)
    ]


async def answers(samplers, count):
    groups = await asyncio.gather(*(samplers.generate([request]) for request in requests(count)))
    return [[(c.output_ids, c.logprobs, c.weight_version) for c in group] for (group,) in groups]


async def until_busy(url):
    async with SamplerClient(url) as client:
        while (await server_info(client))["num_running_samples"] == 0:
            await asyncio.sleep(0.01)


def with_samplers(launch, model, work, *, count=2, **options):
    """Run `work(samplers, servers)` with that many samplers."""

    async def main():
        servers = [launch(number, model, 0) for number in range(count)]
        samplers = Fleet(servers, model=model, version=0, launch=launch, connect=SamplerClient, **options)
        try:
            return await work(samplers, servers)
        finally:
            samplers.close()
            for server in servers:
                server.stop()
            await samplers.disconnect()

    return asyncio.run(main())


def samplers_of(process) -> list[int]:
    """The stage's own samplers: children of its controller."""
    found = []
    for entry in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for pid in map(int, entry.read_text().split()):
            if b"nanodag.sampler" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
