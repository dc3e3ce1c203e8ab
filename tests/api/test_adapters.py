"""Several adapters over one base, answered by one engine; and what is refused."""

import asyncio

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from nanodag.api.application import application
from nanodag.api.command import _folders, _models, parse_arguments
from nanodag.api.served_model import Limits
from nanodag.api.sglang_routes import passed_on
from nanodag.errors import ConfigError
from nanodag.model.headers import weights_digest
from tests.evaluation.tiny import save_tiny_model
from tests.guest_pythons import vllm_python

PROMPT, NUM_NEW = [5, 17, 103], 8
RANKS = {"one": 4, "two": 12}
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


def adapters_over(base, folder):
    """Folders of peft's own, of two ranks, strong enough to change answers."""
    for seed, (name, rank) in enumerate(RANKS.items()):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.data.normal_(std=0.3)
        model.save_pretrained(folder / name)
    return [f"--adapter={name}={folder / name}" for name in RANKS]


def continued(base, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NUM_NEW):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_engine_answers_for_a_base_and_two_adapters_as_peft_does(tmp_path):
    vllm_python()
    base = tmp_path / "base"
    save_tiny_model(base, "qwen3", head_dim=32)
    expected = {"base": continued(base)}
    options = adapters_over(base, tmp_path)
    expected |= {name: continued(base, tmp_path / name) for name in RANKS}
    assert len({tuple(ids) for ids in expected.values()}) == 3
    asked = ["--engine=vllm", "--device=cpu", "--max-batch=8", "--context-length=128", f"--model=base={base}"]
    args = parse_arguments(asked + options)

    async def main():
        models = _models(args, _folders(args.model, "--model", "config.json"), "", tmp_path)
        (fleet,) = {model.backend for model in models.values()}
        await fleet.start(1)
        try:
            app = application(models, engine_routes=passed_on(models, Limits()))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client:
                return await answers(client)
        finally:
            await fleet.end()

    async def answers(client):
        async def ask(name):
            params = {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
            raw = {"input_ids": PROMPT, "sampling_params": params}
            direct = (await client.post(f"/generate?model={name}", json=raw)).json()
            body = {"model": name, "prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
            reply = (await client.post("/v1/completions", json=body)).json()
            return direct["output_ids"], reply

        replies = await asyncio.gather(*map(ask, [*expected, *expected]))  # side by side, in one batch
        return list(zip([*expected, *expected], replies, strict=True))

    found = asyncio.run(main())
    assert {name: ids for name, (ids, _) in found} == expected
    prints = {name: reply["system_fingerprint"] for name, (_, reply) in found}
    assert len(set(prints.values())) == 3, prints
    texts = {name: reply["choices"][0]["text"] for name, (_, reply) in found}
    assert len(set(texts.values())) == 3, texts


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--engine=embedded"], "embedded has the weights of one model"),
        (["--engine=sglang"], "sglang has the weights of one model"),
        (["--engine=vllm", "--follow=base"], "which --follow changes"),
        (["--engine=vllm", "--adapter=three={tmp}/base"], "has no adapter_config.json"),
    ],
)
def test_adapters_that_no_engine_can_have_are_refused_before_one_starts(tmp_path, options, reason):
    base = tmp_path / "base"
    save_tiny_model(base, "qwen3")
    options = [*adapters_over(base, tmp_path), *(option.format(tmp=tmp_path) for option in options)]
    args = parse_arguments(["--device=cpu", f"--model=base={base}", *options])
    with pytest.raises(ConfigError, match=reason):
        _models(args, _folders(args.model, "--model", "config.json"), "7", tmp_path)


def test_adapters_that_differ_in_their_scale_alone_are_two(tmp_path):
    base = tmp_path / "base"
    save_tiny_model(base, "qwen3")
    adapters_over(base, tmp_path)
    before, config = weights_digest(tmp_path / "one"), tmp_path / "one" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 64'))
    assert weights_digest(tmp_path / "one") != before


def test_a_request_may_not_choose_adapters_by_itself(tmp_path):
    base = tmp_path / "base"
    save_tiny_model(base, "qwen3")
    args = parse_arguments(["--device=cpu", "--engine=vllm", f"--model=base={base}", *adapters_over(base, tmp_path)])
    models = _models(args, _folders(args.model, "--model", "config.json"), "", tmp_path)

    async def main():
        app = application(models, engine_routes=passed_on(models, Limits()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/generate", json={"input_ids": PROMPT, "lora_path": models["one"].lora_path})

    reply = asyncio.run(main())
    assert reply.status_code == 400 and "leave lora_path out" in reply.text
