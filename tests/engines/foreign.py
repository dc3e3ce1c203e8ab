"""Servers of somebody else, who ends them and starts them again at the same address; each in milliseconds."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from nanodag import __version__
from nanodag.engines.external import ExternalServers, Needed
from nanodag.engines.fleet import Fleet
from nanodag.inference.addresses import Address
from nanodag.inference.client import SamplerClient
from nanodag.model.architecture import Architecture, Rope
from tests.engines.fake_samplers import FakeServer, read_weights, write_weights

ROPE = Rope(theta=1e4, kind="default", factor=1.0, low_freq_factor=1.0, high_freq_factor=1.0, original_positions=64)
SHAPE = Architecture(
    model_type="qwen3", vocab_size=32, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    intermediate_size=16, norm_eps=1e-6, tied=True, qk_norm=True, rope=ROPE, max_positions=64,
)  # fmt: skip
NEEDED = Needed(
    engine="embedded",
    architecture=SHAPE,
    precision="float32",
    context=64,
    is_deterministic=True,
    keeps_prompts=True,
    numerics="avx2, torch 2",
)


class Foreign(FakeServer):
    """One of them, as the embedded sampler answers. model, server: what it says of both. answer: to /generate."""

    def __init__(self, *, key: str = "", sees: Path | None = None) -> None:
        super().__init__()
        self.key, self.sees = key, sees
        self.weights, self.version = "its own", "default"
        self.asked: list[str] = []
        self.hangs_at: set[str] = set()
        self.hangs_on_weights = self.is_receiving = False
        self.can_answer = asyncio.Event()
        self.can_answer.set()
        self.model = {"is_generation": True, "architecture": json.loads(json.dumps(asdict(SHAPE)))}
        self.server = {
            "engine": "embedded", "version": __version__, "dtype": "float32", "context_length": 64,
            "deterministic": True, "numerics": "avx2, torch 2",
        }  # fmt: skip
        self.answer = {"output_ids": [1], "meta_info": {"output_token_logprobs": [[-1.0, 1, None]]}}

    async def execute(self, name, request, body):
        self.asked.append(name)
        if name in self.hangs_at:
            await asyncio.sleep(3600)
        if self.key and name != "health_generate" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        try:
            found = await getattr(self, name, self.nothing)(body)
        except ValueError as error:
            return web.json_response({"message": str(error)}, status=400)
        return found if isinstance(found, web.Response) else web.json_response(found)

    async def nothing(self, body):
        return {}

    async def model_info(self, body):
        return self.model | {"weight_version": self.version}

    async def server_info(self, body):
        return self.server

    async def update_weights_from_disk(self, body):
        folder = Path(body["model_path"])
        if self.sees is not None and not folder.is_relative_to(self.sees):
            raise ValueError(f"no config.json in {folder}")
        if (folder / "config.json").exists():  # what real samplers say of a model that they do not know
            raise ValueError((folder / "config.json").read_text())
        if self.hangs_on_weights:
            await asyncio.sleep(3600)
        self.weights, self.version = read_weights(folder), body["weight_version"]
        return {}

    async def init_weights_update_group(self, body):
        self.joined = body
        return {}

    async def end_weight_update(self, body):
        if not self.is_receiving:
            raise ValueError("no weight-update session is open")
        self.is_receiving = False
        return {}

    async def generate(self, body):
        await self.can_answer.wait()
        if isinstance(self.answer, web.Response):
            return self.answer
        meta = {"id": "x", "finish_reason": {"type": "length"}, "weight_version": self.version}
        return self.answer | {"meta_info": meta | self.answer["meta_info"]}


async def again(server: Foreign, **options) -> Foreign:
    """What its operator starts in its place."""
    successor = Foreign(**options)
    await successor.start(urlsplit(server.url).port)
    return successor


def _client(url, key):
    return SamplerClient(url, token=key, request_timeout_s=2.0, vocab_size=32, context_length=256)


@asynccontextmanager
async def fleet(folder, servers, *, file=None, needed=NEEDED, named=None, pause=None, **options):
    """A stage's samplers that are all of others; the servers have been started."""
    for server in servers:
        if not server.url:
            await server.start()
    write_weights(folder / "1", "one")
    write_weights(folder / "2", "two")
    urls = [Address(server.url) for server in servers] if named is None else named
    external = ExternalServers(
        urls if file is None else [],
        file=file,
        needed=needed,
        folder=folder,
        connect=_client,
        **{"every_s": 0.002, "longest_s": 0.01, "timeout_s": 0.3, "patience_s": 0.3, **options},
    )
    samplers = Fleet(
        model=folder / "1", version=-1, launch=None, connect=None, health_every_s=0.01, health_timeout_s=0.1,
        external=external, pause=pause,
    )  # fmt: skip
    samplers.external = external
    try:
        yield samplers
    finally:
        samplers.close()
        await samplers.disconnect()
        for server in servers:
            if server.is_alive:
                server.kill()
        await asyncio.sleep(0.01)  # a killed server closes in the loop's next turns
        for server in servers:
            await server._runner.cleanup()
        await asyncio.sleep(0)


@asynccontextmanager
async def attached(folder, *servers, **options):
    """`fleet` of these servers, which have weights 1; and the list of them, which takes up successors, too."""
    servers = list(servers)
    async with fleet(folder, servers, **options) as samplers:
        await given(samplers, folder, 1)
        yield samplers, servers


async def given(samplers, folder, version):
    """Have all take the weights of a folder, as the controller does."""
    async with samplers.paused():
        await samplers.update_weights_from_disk(str(folder / str(version)), version)


async def until(is_so, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.001)
