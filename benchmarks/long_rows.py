"""Peak memory of a rank of the RL trainer for long responses, alone and with `sequence_parallel`.

    python -m benchmarks.long_rows [--ranks 1 2] [--tokens 4096] [--responses 2] [--layers 6] [--width 256]

Each rank is a process of its own, on a CPU, in the environment that our workers get. It makes a step on a few short
rollouts first, so that optimizer states, kernels and buffers are there. Then it makes one on the long ones, and says
what that added to the peak of its resident memory. The last line compares the largest rank with one rank alone.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from nanodag.worker.launch import worker_environment

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def resident(name: str) -> int:
    """Bytes of VmRSS, what is resident now, or VmHWM, its peak since the last reset."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def save_model(folder: Path, *, layers: int, width: int, vocabulary: int) -> None:
    """A model of random weights with heads of 32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from nanodag.tokenizer.bpe import save_tokenizer

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=1 << 16,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer({bytes([value]): value for value in range(256)}, folder)


def one_rank(folder: Path, *, num_ranks: int, num_tokens: int, num_responses: int, precision: str) -> None:
    """What a rank's process does: prints a line of JSON."""
    warnings.simplefilter("ignore")
    from nanodag.config.kinds.rl import RLStage
    from nanodag.rl.rollouts.rollout import Rollout, prompt_span
    from nanodag.rl.trainer.trainer import Trainer
    from nanodag.train.deepspeed_engine import leave
    from tests.rl.rollouts import sampled_span

    def rollouts(length: int) -> list[Rollout]:
        prompt = list(range(16))
        return [
            Rollout(
                group_id="g",
                prompt_id="g",
                sample_index=number,
                spans=(
                    prompt_span(prompt),
                    sampled_span([(7 * number + 3 * i) % 1000 for i in range(length)], [-9.0] * length, version=0),
                ),
                finish_reason="length",
                reward=float(number),
            )
            for number in range(num_responses)
        ]

    config = RLStage.of(
        kind="rl",
        data=["file:x"],
        precision=precision,
        sampler={"context": num_tokens + 64},
        max_new_tokens=num_tokens,
        micro_batch_tokens=num_responses * num_tokens + 64,
        sequence_parallel=num_ranks,
        activation_checkpointing=False,
    )
    trainer = Trainer(config, folder, device="cpu")
    trainer.train(1, rollouts(64))
    before = resident("VmRSS")
    CLEAR.write_text("5")  # the peak begins again
    began, cpu = time.monotonic(), time.process_time()
    reply = trainer.train(2, rollouts(num_tokens))
    print(
        json.dumps(
            {
                "rank": trainer.engine.rank,
                "before": before,
                "peak": resident("VmHWM"),
                "seconds": time.monotonic() - began,
                "cpu_seconds": time.process_time() - cpu,
                "gradient_norm": reply["gradient_norm"],
            }
        ),
        flush=True,
    )
    leave()


def measured(
    folder: Path, *, num_ranks: int, num_tokens: int, num_responses: int, precision: str
) -> list[dict[str, float]]:
    """What each of the ranks that share the rows says. folder: of the model."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(num_ranks):
        own = {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
        command = [sys.executable, "-m", "benchmarks.long_rows", "--one", str(folder), "--ranks", str(num_ranks)]
        command += ["--tokens", str(num_tokens), "--responses", str(num_responses), "--precision", precision]
        environment = {**worker_environment(1, device="cpu"), **own}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a rank ended with {process.returncode}: {output[-2000:]}")
        found.append(json.loads(output.strip().splitlines()[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--responses", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        one_rank(
            arguments.one,
            num_ranks=arguments.ranks[0],
            num_tokens=arguments.tokens,
            num_responses=arguments.responses,
            precision=arguments.precision,
        )
        return
    added: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), layers=arguments.layers, width=arguments.width, vocabulary=arguments.vocabulary)
        for num_ranks in arguments.ranks:
            found = measured(
                Path(folder),
                num_ranks=num_ranks,
                num_tokens=arguments.tokens,
                num_responses=arguments.responses,
                precision=arguments.precision,
            )
            for of_rank in found:
                print(
                    f"{num_ranks} ranks, rank {of_rank['rank']}: the step added {of_rank['peak'] - of_rank['before']:,}"
                    f" bytes to {of_rank['before']:,}; {of_rank['seconds']:.1f} s, {of_rank['cpu_seconds']:.1f} CPU-s, "
                    f"gradient norm {of_rank['gradient_norm']:.6g}"
                )
            added[num_ranks] = int(max(of_rank["peak"] - of_rank["before"] for of_rank in found))
    first = arguments.ranks[0]
    for num_ranks in arguments.ranks[1:]:
        print(f"{num_ranks} ranks take {added[num_ranks] / added[first]:.0%} of what {first} takes")


if __name__ == "__main__":
    main()
