"""`nanodag serve` under streaming clients, beside one batch after the other on the same engine.

    python -m benchmarks.serving                      # a random Qwen3 of 6 M parameters, 64 clients, 2 minutes

Rounds alternate: clients that stream one answer after the other, then the same requests as whole batches by SGLang's
/generate. Both meet the same engine process, in deterministic mode. Reported: errors; answers that differ from the same
request alone; time to the first token and between events at p50, p95 and p99; tokens per CPU-second of the engine on
both sides; CPU-seconds of the API process.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from nanodag.worker.launch import worker_environment

MODEL = {
    "vocab_size": 600, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 1024, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS_A_CLIENT = 3  # each side runs every prompt: when one comes again, no slot holds it any more
PROMPT_TOKENS = 32
BATCHES = 6  # a round: each prompt twice, and enough for a CPU time that ticks of 10 ms do not blur


@dataclass
class Seen:
    """What clients of one side saw."""

    num_tokens: int = 0
    num_cached: int = 0  # of prompts, not run again
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    texts: list[tuple[int, str]] = field(default_factory=list)
    engine_s: float = 0.0
    api_s: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0, help="of streaming, over all rounds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new", type=int, default=128, help="tokens of each answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        command = [sys.executable, "-m", "nanodag.chat.web", "--model", f"m={folder}", "--port", "0", "--device", "cpu"]
        command += ["--max-batch", str(args.clients), "--context-length", "512", "--deterministic"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=worker_environment(1)) as server:
            try:
                url = re.search(r"(http://\S+)/v1", server.stdout.readline())[1]
                report(*asyncio.run(measure(args, url, psutil.Process(server.pid))))
            finally:
                server.terminate()
    return 0


def write_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
    from nanodag.tokenizer.train import SAMPLES

    torch.manual_seed(0)
    save_tokenizer(train_bpe(iter(SAMPLES.values()), MODEL["vocab_size"]), folder)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL))
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters")
    model.save_pretrained(folder)


async def measure(args: argparse.Namespace, url: str, server: psutil.Process) -> tuple[Seen, Seen, dict[int, str]]:
    (engine,) = server.children()
    streamed, batched = Seen(), Seen()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as client:
        alone = {n: await whole(client, n, args.new) for n in range(PROMPTS_A_CLIENT * args.clients)}
        for _ in range(args.rounds):
            for seen, work in ((streamed, streams(args, client, streamed)), (batched, batches(args, client, batched))):
                before = cpu_s(engine), cpu_s(server)
                await work
                seen.engine_s += cpu_s(engine) - before[0]
                seen.api_s += cpu_s(server) - before[1]
        metrics = (await client.get("/metrics")).text
    assert "nanodag_samples_in_flight 0.0" in metrics, "samples are in flight after all have ended"
    return streamed, batched, alone


def body(number: int, new: int) -> dict[str, object]:
    prompt = [(7 * number + 11 * place) % 500 + 20 for place in range(PROMPT_TOKENS)]
    return {"prompt": prompt, "max_tokens": new, "seed": number, "ignore_eos": True}


async def whole(client: httpx.AsyncClient, number: int, new: int) -> str:
    return (await client.post("/v1/completions", json=body(number, new))).json()["choices"][0]["text"]


async def streams(args: argparse.Namespace, client: httpx.AsyncClient, seen: Seen) -> None:
    until = time.monotonic() + args.seconds / args.rounds

    async def one_client(number: int) -> None:
        while time.monotonic() < until:
            await stream(client, number, args.new, seen)
            number = (number + args.clients) % (PROMPTS_A_CLIENT * args.clients)

    await asyncio.gather(*(one_client(number) for number in range(args.clients)))


async def stream(client: httpx.AsyncClient, number: int, new: int, seen: Seen) -> None:
    wanted = body(number, new) | {"stream": True, "stream_options": {"include_usage": True}}
    text, last = "", time.monotonic()
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json=wanted) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if reply.status_code != 200 or "error" in event:
                seen.errors.append(line)
                return
            if usage := event.get("usage"):
                seen.num_tokens += usage["completion_tokens"]
                seen.num_cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            if event["choices"]:
                text += event["choices"][0]["text"]
                now = time.monotonic()
                times.append(now - last)
                last = now
    seen.first_s += times[:1]
    seen.between_s += times[1:]
    seen.texts.append((number, text))


async def batches(args: argparse.Namespace, client: httpx.AsyncClient, seen: Seen) -> None:
    for batch in range(BATCHES):
        first = batch % PROMPTS_A_CLIENT * args.clients
        wanted = [body(first + number, args.new) for number in range(args.clients)]
        params = [{"max_new_tokens": args.new, "ignore_eos": True, "sampling_seed": one["seed"]} for one in wanted]
        content = {"input_ids": [one["prompt"] for one in wanted], "sampling_params": params}
        reply = await client.post("/generate", json=content)
        reply.raise_for_status()
        seen.num_tokens += sum(len(one["output_ids"]) for one in reply.json())
        seen.num_cached += sum(one["meta_info"]["cached_tokens"] for one in reply.json())


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def report(streamed: Seen, batched: Seen, alone: dict[int, str]) -> None:
    mixed = sum(text != alone[number] for number, text in streamed.texts)
    print(f"{len(streamed.texts)} streams, {len(streamed.errors)} errors, {mixed} unlike the same request alone")
    print("".join(f"{error}\n" for error in sorted(set(streamed.errors))), end="")
    for name, values in (("first token", streamed.first_s), ("between events", streamed.between_s)):
        cuts = statistics.quantiles(values, n=100)
        print(f"{name}: p50 {cuts[49] * 1e3:,.0f} ms, p95 {cuts[94] * 1e3:,.0f} ms, p99 {cuts[98] * 1e3:,.0f} ms")
    speeds = [seen.num_tokens / seen.engine_s for seen in (streamed, batched)]
    print(f"prompt tokens that were not run: streamed {streamed.num_cached:,}, batches {batched.num_cached:,}")
    print(f"engine, tokens per CPU-second: streamed {speeds[0]:,.0f}, batches {speeds[1]:,.0f}", end="")
    print(f" ({speeds[0] / speeds[1] - 1:+.1%})")
    print(
        f"API: {streamed.api_s:.1f} CPU-s beside the engine's {streamed.engine_s:.1f}, {streamed.num_tokens:,} tokens"
    )


if __name__ == "__main__":
    sys.exit(main())
