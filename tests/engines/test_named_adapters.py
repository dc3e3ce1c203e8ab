"""Adapters that a server holds by name, as SGLang does: what it is asked, and what each answer is of."""

import json
from pathlib import Path

import pytest

from nanodag.engines.named_adapters import NamedAdapters
from nanodag.errors import BadRequest
from nanodag.inference.protocol import Request, SamplingParams
from tests.engines.foreign import Foreign


class Named(Foreign):
    """As SGLang: a name is loaded once, and a request that bears another one is refused."""

    def __init__(self, **loaded):
        super().__init__()
        self.loaded, self.answered = loaded, []

    async def load_lora_adapter(self, body):
        config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        if body["lora_name"] in self.loaded or not config:
            raise ValueError(f"{body['lora_name']} cannot be loaded")
        self.loaded[body["lora_name"]] = body["lora_path"]
        return {"success": True}

    async def unload_lora_adapter(self, body):
        del self.loaded[body["lora_name"]]
        return {"success": True}

    async def update_weight_version(self, body):
        self.version = body["new_version"]
        return {"success": True}

    async def generate(self, body):
        if (name := body.get("lora_path", "")) not in (*self.loaded, ""):
            raise ValueError(f"no adapter {name}")
        self.answered.append((self.version, name))
        return await super().generate(body)


@pytest.fixture
def adapters(tmp_path):
    """adapters(name, config): a folder of them."""

    def made(name, config='{"r": 4}'):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(config)
        return tmp_path / name

    return made


def client_of(server):
    return NamedAdapters(server.url)


ASK = [Request(input_ids=[1], params=SamplingParams(max_new_tokens=1))]


async def test_each_version_has_a_name_which_requests_bear_and_the_one_before_is_given_up(adapters):
    server = Named()
    await server.start()
    async with client_of(server) as client:
        client.begins_with(adapters("base").parent, 0)  # a model without any
        await client.generate(ASK)
        for version in (1, 2):
            await client.update_weights_from_disk(str(adapters(str(version))), version)
            await client.generate(ASK)
        assert [(version, name[:8]) for version, name in server.answered] == [
            *(("default", ""), ("1", "policy-1"), ("2", "policy-2")),
        ]
        assert [name[:8] for name in server.loaded] == ["policy-2"]
    server.kill()


async def test_adapters_that_are_refused_leave_those_before_and_the_same_version_again_is_taken(adapters):
    server = Named()
    await server.start()
    async with client_of(server) as client:
        folder = str(adapters("1"))
        await client.update_weights_from_disk(folder, 1)
        with pytest.raises(BadRequest, match=r"policy-2-.* cannot be loaded"):
            await client.update_weights_from_disk(str(adapters("2", "{}")), 2)
        await client.update_weights_from_disk(folder, 1)
        await client.generate(ASK)
        await client.update_weights_from_disk(folder, 1)
        await client.generate(ASK)
    (_, first), (_, second) = server.answered
    assert first != second and first[:8] == second[:8] == "policy-1" and [*server.loaded] == [second]
    server.kill()


async def test_a_server_that_begins_with_adapters_is_asked_for_them(adapters):
    server = Named(**{"policy-7": "/there"})
    await server.start()
    async with client_of(server) as client:
        client.begins_with(adapters("7"), 7)
        await client.generate(ASK)
    assert server.answered == [("default", "policy-7")]
    server.kill()
