"""Answers a second of a reward model as an RL reward: `python -m benchmarks.reward_model [--depth 4] [--threads 1]`.

64 answers of 16 to 160 tokens to prompts of about 64, 8 answers to each, by a model with random weights. `transformers`
scores one answer at a time through AutoModelForSequenceClassification, as a folder of a type that nanodag does not
compute; `alone` is our own code, one answer at a time; `batched` gets all answers together. Seconds are those of the
CPU; wall clock stands beside them. What a score differs by is told, and whether `alone` and `batched` agree to the bit.
"""

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanodag.config.dial import shape_of
from nanodag.model.build import qwen3_architecture
from nanodag.model.folder import save
from nanodag.model.scorer import Scorer
from nanodag.rewards import reward_model
from nanodag.rewards.reward_model import RewardModel
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.encoding import Encoding
from tests.rl.stages import BYTES

Samples = list[tuple[dict[str, Any], str]]
ANSWERS, GROUP, PROMPT, SHORTEST, LONGEST = 64, 8, 64, 16, 160


def write_model(folder: Path, depth: int) -> None:
    """A scorer of a depth, with a tokenizer of bytes: a letter is a token."""
    save_tokenizer(BYTES, folder / "tokenizer")
    vocabulary = Encoding(folder / "tokenizer").size
    model = Scorer(qwen3_architecture(shape_of(depth), vocabulary=vocabulary, rope_theta=1e4, max_positions=2048))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    save(folder / "model", dict(model.named_parameters()), tokenizer=folder / "tokenizer", model=model)


def samples() -> Samples:
    """The answers with their prompts."""
    draw = random.Random(0)

    def text(size: int) -> str:
        return "".join(draw.choice("0123456789 +-") for _ in range(size))

    prompts = [{"messages": [{"role": "user", "content": text(PROMPT)}]} for _ in range(ANSWERS // GROUP)]
    return [(prompt, text(draw.randint(SHORTEST, LONGEST))) for prompt in prompts for _ in range(GROUP)]


def measured(score: Callable[[Samples], list[Any]], asked: Samples, passes: int) -> tuple[list[float], float, float]:
    """Scores; CPU-seconds and wall clock of a pass, the least of several after one to warm up."""
    score(asked)
    seconds = []
    for _ in range(passes):
        began, used = time.perf_counter(), time.process_time()
        found = score(asked)
        seconds.append((time.process_time() - used, time.perf_counter() - began))
    return [reward.value for reward in found], min(cpu for cpu, _ in seconds), min(wall for _, wall in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.depth)
        own = RewardModel(str(folder / "model"), threads=options.threads)
        ours, reward_model._own_model = reward_model._own_model, lambda *unused: None
        theirs = RewardModel(str(folder / "model"), threads=options.threads)
        reward_model._own_model = ours
        ways = {
            "transformers": lambda asked: [theirs.score_batch([one])[0] for one in asked],
            "alone": lambda asked: [own.score_batch([one])[0] for one in asked],
            "batched": own.score_batch,
        }
        found = {name: measured(score, samples(), options.passes) for name, score in ways.items()}
    for name, (scores, cpu, wall) in found.items():
        apart = max(abs(a - b) for a, b in zip(scores, found["transformers"][0], strict=True))
        print(
            f"{name:12} {ANSWERS / cpu:8.1f} answers a CPU-second, {cpu:6.2f} CPU-s, {wall:6.2f} s, "
            f"at most {apart:.1e} from transformers"
        )
    print(f"alone and batched agree to the bit: {found['alone'][0] == found['batched'][0]}")
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
