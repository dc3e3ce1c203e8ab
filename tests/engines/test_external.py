"""Samplers that somebody else runs: looked at, given weights, left out when they are lost, never stopped."""

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web

from nanodag.engines.external import layers_differ, misfits
from nanodag.errors import BadRequest, SamplerError, SamplerLost
from nanodag.inference.addresses import Address, parse_address, read_addresses
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Request
from nanodag.rl.sync import broadcast_sync
from nanodag.rl.sync.broadcast_sync import DistributedSync
from tests.engines.foreign import NEEDED, Foreign, again, attached, fleet, given, until

ASKED = [Request(input_ids=[1, 2])]


def sampled_by(*servers):
    return [server.asked.count("generate") for server in servers]


def test_an_address_is_a_url_with_the_file_of_its_key_or_is_refused():
    assert parse_address("http://node2:30000/") == Address("http://node2:30000")
    assert parse_address("https://[::1]:9 /keys/my key") == Address("https://[::1]:9", "/keys/my key")
    for text in ("", "node2:30000", "ftp://x", "http://x/v1", "http://u:p@x", "http://x:y", "http://x?a", "http://"):
        with pytest.raises(ValueError, match="not of the form"):
            parse_address(text)
    with pytest.raises(ValueError, match="whole path"):
        parse_address("http://x keys")


def test_only_a_loopback_address_is_of_this_machine():
    here, elsewhere = ("localhost:1", "127.0.0.1:1", "127.9.9.9", "[::1]:1"), ("127.x:1", "127.0.0.1.nip.io", "[::2]:1")
    assert all(Address(f"http://{host}").is_here for host in here)
    assert not any(Address(f"http://{host}").is_here for host in elsewhere)


def test_a_file_of_addresses_is_read_with_its_comments_and_the_wrong_line_named(tmp_path):
    file = tmp_path / "urls"
    file.write_text("# two\nhttp://a:1\n\n  http://b:2 /key  # \n")
    assert read_addresses(file) == [Address("http://a:1"), Address("http://b:2", "/key  #")]
    for text, said in (
        ("http://a:1\nnode", "line 2"),
        ("http://a:1\nhttp://a:1/", "line 2: http://a:1 is there"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_addresses(file)


def test_every_difference_from_what_the_stage_needs_is_said_with_what_to_do():
    fits = Foreign()
    assert misfits(NEEDED, fits.model, fits.server) == []

    def wrong(needed=NEEDED, model=(), server=()):
        return " | ".join(misfits(needed, fits.model | dict(model), fits.server | dict(server)))

    architecture = fits.model["architecture"]
    assert "vocab_size 33, the stage's 32" in wrong(model={"architecture": architecture | {"vocab_size": 33}})
    assert "num_layers None" in wrong(model={"architecture": "rubbish"})
    assert "does not generate" in wrong(model={"is_generation": False})
    assert "nanodag 0.0.9, and this is" in wrong(server={"version": "0.0.9"})
    assert "--dtype float32" in wrong(server={"dtype": "bfloat16"})
    assert "--context-length 64" in wrong(server={"context_length": 63})
    assert "--deterministic" in wrong(server={"deterministic": False})
    assert "rounds otherwise" in wrong(server={"numerics": "amx, torch 2"})
    assert not wrong(replace(NEEDED, is_deterministic=False), server={"numerics": "x", "deterministic": False})
    sglang = replace(NEEDED, engine="sglang", is_deterministic=False)
    assert "engine embedded, and the stage's sampler.engine is sglang" in wrong(sglang)
    model = {"is_generation": True, "weight_version": "default", "model_type": "qwen3"}
    server = {"version": "0.5.23", "dtype": "float32", "max_req_input_len": 66, "disable_radix_cache": False}
    assert misfits(sglang, model, server) == []
    assert "--context-length 72" in misfits(sglang, model, server | {"max_req_input_len": 62})[0]
    assert "type llama" in misfits(sglang, model | {"model_type": "llama"}, server)[0]
    assert "--disable-radix-cache" in misfits(replace(sglang, keeps_prompts=False), model, server)[0]
    assert "does not speak" in misfits(sglang, model, {})[0]
    vllm = replace(sglang, engine="vllm")
    model, server = model | {"architecture": architecture}, server | {"engine": "vllm", "version": "0.32.0"}
    assert misfits(vllm, model, server) == []
    assert (
        "vocab_size 33, the stage's 32"
        in misfits(vllm, {**model, "architecture": architecture | {"vocab_size": 33}}, server)[0]
    )
    assert "engine vllm, and the stage's sampler.engine is sglang" in misfits(sglang, model, server)[0]
    server = server | {"engine": "sglang", "version": "0.5.23"}
    for name in ("dp_size", "pp_size", "nnodes"):
        assert f"its {name} is 2, and such a server takes no weights" in misfits(sglang, model, server | {name: 2})[0]
        assert misfits(sglang, model, server | {name: 1}) == []


def test_layers_that_a_server_has_too_few_or_too_many_are_counted_by_the_names_of_its_tensors():
    names = {"model.embed_tokens.weight": "", "model.layers.0.a": "", "model.layers.1.a": ""}
    assert layers_differ([names, names], 2) == ""
    assert "2 layers, the stage's 3" in layers_differ([names], 3)
    assert "2 layers, the stage's 1" in layers_differ([names], 1)


def test_servers_of_others_take_the_weights_share_the_prompts_and_are_not_stopped(tmp_path):
    async def work():
        servers = [Foreign(), Foreign(key="secret")]
        await servers[1].start()
        await servers[0].start()
        (tmp_path / "key").write_text("secret\n")
        named = [Address(servers[0].url), Address(servers[1].url, str(tmp_path / "key"))]
        async with fleet(tmp_path, servers, named=named) as samplers:
            await given(samplers, tmp_path, 1)
            assert [server.weights for server in servers] == ["one", "one"]
            await given(samplers, tmp_path, 2)
            assert await samplers.fingerprints() == [[{"w": "two"}]] * 2
            found = await asyncio.gather(*(samplers.generate(ASKED) for _ in range(4)))
            assert [answer.weight_version for ((answer,),) in found] == ["2"] * 4
            assert sampled_by(*servers) == [2, 2]
            assert {"abort_request", "continue_generation"} <= set(servers[0].asked)
            samplers.close()
            await samplers.disconnect()
            assert all(server.is_alive for server in servers)

    asyncio.run(work())


def test_one_that_was_left_in_the_midst_of_new_weights_is_out_of_it_before_it_takes_any(tmp_path):
    async def work():
        servers = [Foreign(), Foreign()]
        servers[0].is_receiving = True
        async with fleet(tmp_path, servers) as samplers:
            await given(samplers, tmp_path, 1)
            assert not servers[0].is_receiving and [server.weights for server in servers] == ["one", "one"]

    asyncio.run(work())


def test_one_that_is_killed_is_left_out_until_it_is_back_and_has_the_current_weights(tmp_path):
    async def work():
        async with attached(tmp_path, Foreign(), Foreign()) as (samplers, servers):
            servers[0].can_answer.clear()
            step = [asyncio.ensure_future(samplers.generate(ASKED)) for _ in range(4)]
            await until(lambda: sampled_by(*servers) == [2, 2])
            servers[0].kill()
            await asyncio.gather(*step)  # the other one was asked
            assert sampled_by(servers[1]) == [4]
            await given(samplers, tmp_path, 2)  # holds nobody up
            assert await samplers.versions() == ["2"] and await samplers.fingerprints() == [[], [{"w": "two"}]]
            servers.append(back := await again(servers[0]))
            await until(lambda: back.weights == "two")
            await until(lambda: samplers.replicas[0].is_up)
            await asyncio.gather(*(samplers.generate(ASKED) for _ in range(2)))
            assert sampled_by(back) == [1]
            assert back.asked.index("update_weights_from_disk") < back.asked.index("generate")

    asyncio.run(work())


def test_one_that_was_started_again_unseen_is_found_out_by_its_weights(tmp_path):
    async def work():
        async with attached(tmp_path, Foreign()) as (samplers, servers):
            servers[0].kill()
            servers.append(back := await again(servers[0]))
            ((answer,),) = await samplers.generate(ASKED)
            assert answer.weight_version == "1" and back.weights == "one"

    asyncio.run(work())


def test_the_only_one_that_is_killed_between_taking_weights_and_saying_so_does_not_hold_the_sync_up_for_ever(tmp_path):
    async def work():
        async with attached(tmp_path, Foreign(), patience_s=5.0) as (samplers, servers):
            async with samplers.paused():
                await samplers.update_weights_from_disk(str(tmp_path / "2"), 2)
                servers[0].kill()
                servers.append(await again(servers[0]))
                async with asyncio.timeout(1):
                    assert await samplers.versions() == ["2"]
            assert servers[1].weights == "two"

    asyncio.run(work())


def test_one_that_hangs_is_left_out_and_its_prompts_are_asked_of_another(tmp_path):
    async def work():
        async with attached(tmp_path, Foreign(), Foreign()) as (samplers, servers):
            servers[0].can_answer.clear()
            servers[0].hangs_at = {"health_generate"}
            await asyncio.gather(*(samplers.generate(ASKED) for _ in range(2)))
            assert sampled_by(servers[1]) == [2] and servers[0].is_alive

    asyncio.run(work())


def test_one_that_is_cut_off_while_it_takes_weights_holds_nobody_up_at_first_nor_when_it_is_back(tmp_path):
    async def work():
        async with attached(tmp_path, Foreign(), Foreign()) as (samplers, servers):
            servers[0].hangs_at = {"health_generate", "update_weights_from_disk"}
            async with asyncio.timeout(1):  # less than a request may take
                await given(samplers, tmp_path, 2)
            servers[0].hangs_at = {"health_generate"}
            servers[0].hangs_on_weights = True
            count = servers[0].asked.count("update_weights_from_disk")
            await until(lambda: servers[0].asked.count("update_weights_from_disk") > count + 1)  # the probe before
            async with asyncio.timeout(1):
                await given(samplers, tmp_path, 1)
            assert await samplers.versions() == ["1"] and servers[1].weights == "one"

    asyncio.run(work())


def test_a_group_of_weights_has_a_place_for_each_rank_of_an_attached_server(tmp_path, monkeypatch):
    async def work():
        asked = {}

        async def ask(do, **arguments):
            asked[do] = arguments
            buckets = [{"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}]
            return [{"buckets": buckets, "port": 1, "failure": "", "fingerprints": {}}]

        server = Foreign()
        server.server["tp_size"] = 4
        async with attached(tmp_path, server) as (samplers, _):
            sync = DistributedSync(samplers, ask, check_every=0, timeout_s=1.0)
            (member,) = await samplers.members()
            server.is_receiving = True
            await sync.give(member.client, tmp_path / "1", 1)
        assert asked["open_group"]["size"] == server.joined["world_size"] == 1 + 4
        assert server.joined["rank_offset"] == 1

    monkeypatch.setattr(broadcast_sync, "is_here", lambda client: False)
    asyncio.run(work())


def test_the_trainer_is_asked_to_wait_for_none_that_does_not_answer(tmp_path, monkeypatch):
    async def work():
        asked, silent = [], Foreign()
        silent.hangs_at = {"model_info"}

        async def ask(do, **arguments):
            asked.append(do)
            return [{"buckets": [{"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}]}]

        async with fleet(tmp_path, [silent]) as samplers:
            sync = DistributedSync(samplers, ask, check_every=0, timeout_s=1.0)
            for url, why in (("http://127.0.0.1:1", "was lost at /model_info"), (silent.url, "answer within 0.05 s")):
                async with SamplerClient(url) as client:
                    with pytest.raises(SamplerLost, match=why):
                        await sync.give(client, tmp_path / "1", 1)
        assert asked == ["layout"]

    monkeypatch.setattr(broadcast_sync, "is_here", lambda client: False)
    monkeypatch.setattr(broadcast_sync, "GRACE_S", 0.05)
    asyncio.run(work())


def test_weights_that_come_in_the_midst_of_answers_go_to_those_that_are_there_and_each_goes_on(tmp_path):
    async def work():
        async with attached(tmp_path, Foreign(), Foreign(), pause="in_place") as (samplers, servers):
            for server in servers:
                server.can_answer.clear()
            step = [asyncio.ensure_future(samplers.generate(ASKED)) for _ in range(2)]
            await until(lambda: sampled_by(*servers) == [1, 1])
            async with samplers.paused():
                servers[0].kill()
                await samplers.update_weights_from_disk(str(tmp_path / "2"), 2)
            servers.append(back := await again(servers[0]))
            servers[1].can_answer.set()
            found = await asyncio.gather(*step)  # began with weights 1, and end with 2
            assert [answer.weight_version for ((answer,),) in found] == ["2", "2"]
            await until(lambda: back.weights == "two" and samplers.replicas[0].is_up)
            for server in (servers[1], back):
                assert server.asked.count("continue_generation") > server.asked.count("pause_generation")

    asyncio.run(work())


RUBBISH = {
    "no JSON": (web.Response(text="<html>"), "what no sampler answers"),
    "another JSON": (web.json_response({"choices": []}), "what no sampler answers"),
    "an error": (web.Response(status=500, text="out of memory"), "answered 500: out of memory"),
    "a redirect": (web.Response(status=302, headers={"Location": "http://x/"}), "answered 302"),
    "no log-probabilities": ({"output_ids": [1, 2], "meta_info": {}}, "no log-probabilities"),
    "a log-probability above 0": (
        {"output_ids": [1], "meta_info": {"output_token_logprobs": [[3.0, 1, None]]}},
        "or impossible ones",
    ),
    "no token": ({"output_ids": ["a"], "meta_info": {"output_token_logprobs": [[-1.0, 1, None]]}}, "what is no token"),
    "older weights": ({"output_ids": [], "meta_info": {"weight_version": "0"}}, "weights '0' and was given 1"),
}


@pytest.mark.parametrize("name", RUBBISH)
def test_one_that_answers_what_cannot_be_is_left_out_with_the_reason(tmp_path, name, caplog):
    async def work():
        bad, good = Foreign(), Foreign()
        bad.answer, said = RUBBISH[name]
        async with fleet(tmp_path, [bad, good]) as samplers:
            await given(samplers, tmp_path, 1)
            await asyncio.gather(*(samplers.generate(ASKED) for _ in range(2)))
            assert sampled_by(good) == [2]
            assert f"{bad.url} is left out" in caplog.text and said in caplog.text

    asyncio.run(work())


def test_those_that_do_not_fit_end_the_stage_at_its_begin_with_every_reason_and_those_that_are_down_do_not(tmp_path):
    async def work():
        servers = [Foreign(), Foreign(key="secret"), Foreign(sees=tmp_path / "elsewhere"), Foreign(), Foreign()]
        servers[0].server["dtype"] = "bfloat16"
        async with fleet(tmp_path, servers) as samplers:
            servers[3].kill()
            with pytest.raises(SamplerError) as error:
                await samplers.external.first_look()
            said = str(error.value)
            assert f"{servers[0].url}: its dtype is bfloat16" in said
            assert "answered 401: no key (" in said and "its key stands in a file behind its URL" in said
            assert "does not see what this machine writes" in said and "weights.sync: distributed" in said
            assert servers[3].url not in said and servers[4].url not in said

    asyncio.run(work())


@pytest.mark.parametrize(
    ("answer", "is_refused"),
    [
        ({"status": 404, "text": "Not Found"}, True),
        ({"status": 302, "headers": {"location": "/login"}}, True),
        ({"text": "<html>It works!</html>", "content_type": "text/html"}, True),
        ({"status": 503, "text": "it starts"}, False),
    ],
)
def test_a_router_or_web_server_is_refused_at_once_and_a_server_that_starts_is_waited_for(tmp_path, answer, is_refused):
    class Other(Foreign):
        async def model_info(self, body):
            return web.Response(**answer)

    async def work():
        async with fleet(tmp_path, [Other()]) as samplers:
            if not is_refused:
                return await samplers.external.first_look()
            with pytest.raises(SamplerError, match=r"cannot be used.*/model_info of .*no router or web server"):
                await samplers.external.first_look()

    asyncio.run(work())


def test_a_key_file_that_is_not_there_is_named(tmp_path):
    async def work():
        server = Foreign()
        await server.start()
        async with fleet(tmp_path, [server], named=[Address(server.url, f"{tmp_path}/none")]) as samplers:
            with pytest.raises(BadRequest, match=r"key.* cannot be read"):
                await samplers.external.attach(Address(server.url, f"{tmp_path}/none"))

    asyncio.run(work())


def test_a_stage_without_any_sampler_waits_and_then_ends_with_the_reasons(tmp_path):
    async def work():
        hung = Foreign()
        hung.hangs_at = {"server_info"}
        async with fleet(tmp_path, [hung], timeout_s=0.02, patience_s=0.1) as samplers:
            with pytest.raises(SamplerLost, match=r"None|No sampler is up.*no answer within 0.02 s"):
                await given(samplers, tmp_path, 1)
            hung.hangs_at = set()
            await given(samplers, tmp_path, 1)
            assert await samplers.versions() == ["1"]

    asyncio.run(work())


def test_a_file_of_servers_may_grow_and_shrink_and_a_wrong_one_changes_nothing(tmp_path, caplog):
    async def work():
        servers = [Foreign(), Foreign()]
        for server in servers:
            await server.start()
        file = tmp_path / "urls"
        file.write_text(servers[0].url)
        async with fleet(tmp_path, servers, file=file) as samplers:
            await given(samplers, tmp_path, 1)
            assert servers[1].weights == "its own"
            file.write_text(f"{servers[0].url}\n{servers[1].url}\n")
            await asyncio.sleep(0.005)
            await samplers.generate(ASKED)
            await until(lambda: len(samplers.replicas) == 2 and samplers.replicas[1].is_up)
            assert servers[1].weights == "one"
            file.write_text("rubbish\n")
            await asyncio.sleep(0.005)
            await asyncio.gather(*(samplers.generate(ASKED) for _ in range(2)))
            assert "line 1" in caplog.text and min(sampled_by(*servers)) > 0
            before = sampled_by(servers[0])
            servers[0].can_answer.clear()
            under_way = [asyncio.ensure_future(samplers.generate(ASKED)) for _ in range(2)]
            await until(lambda: sampled_by(servers[0]) != before)
            file.write_text(servers[1].url)
            await asyncio.sleep(0.005)
            count = sampled_by(servers[0])
            await asyncio.gather(*(samplers.generate(ASKED) for _ in range(3)))
            servers[0].can_answer.set()
            await asyncio.gather(*under_way)  # it answers what it was asked before, nobody else does
            assert sampled_by(servers[0]) == count and sum(sampled_by(*servers)) == 1 + 2 + 2 + 3
            await given(samplers, tmp_path, 2)
            assert [server.weights for server in servers] == ["one", "two"]

    asyncio.run(work())
