"""One GRPO step of tiny models of 26 types, here and by TRL's GRPOTrainer: the furthest distance of two weights.

    python -m benchmarks.grpo_step_vs_trl [--types qwen3_moe gemma2] [--zero-stage 1]

Run it in an environment that has both this project and TRL. Both sides get the same three answers of 4, 16 and 8 tokens
to one prompt, their advantages, and AdamW's first step at a rate of 1e-3 behind a gradient clipped to a norm of 1. Here
the trainer's packed rows and forward passes are used, there GRPOTrainer's loss over filled-up rows, loss_type bnpo,
without the balancing loss of experts that TRL adds by itself. A type that reads images has one in its prompt. The last
column is how far the furthest weight moved.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.chat import load_renderer
from tests.model.model_types import TYPES, make_tiny, taken_by_transformers
from tests.model.vision_models import KINDS, conversation, make_vision, seen
from tests.rl.models import furthest, trainer_of, weights_of
from tests.rl.rollouts import rollout

PROMPT, ANSWER, TIMES = [5, 9, 40, 3, 8, 17, 60], [3, 55, 9, 70], (1, 4, 2)
RATE, BETAS, EPS = 1e-3, (0.9, 0.98), 1e-4


class TrlFailed(Exception):
    """TRL's side of a type ended with an error."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=[*TYPES, *KINDS], default=[*TYPES, *KINDS])
    parser.add_argument("--zero-stage", type=int, default=1)
    options = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print("| type | apart | moved |\n|---|---|---|")
    worst = 0.0
    for name in options.types:
        with tempfile.TemporaryDirectory() as temporary:
            try:
                apart, moved = step(Path(temporary), name, options.zero_stage)
            except TrlFailed as error:
                print(f"| {name} | TRL fails: {error} | |", flush=True)
                continue
        worst = max(worst, apart)
        print(f"| {name} | {apart:.1e} | {moved:.1e} |", flush=True)
    print(f"furthest: {worst:.1e} of a rate of {RATE:g}")
    return int(worst > 2e-5)


def step(folder: Path, name: str, zero_stage: int) -> tuple[float, float]:
    """Furthest distance of two weights after a step on either side, and how far the furthest one moved here."""
    torch.manual_seed(0)
    prompt = PROMPT
    if name in KINDS:
        model = make_vision(name, folder / "model")
        prompt = load_renderer(folder / "model").prompt(conversation(0)["messages"][:1])
    else:
        model = make_tiny(name, folder / "model")
        taken_by_transformers(folder / "model")
    save_tokenizer({bytes([value]): value for value in range(64)}, folder / "tokenizer")  # which TRL wants to see
    rollouts = [rollout("a", i, prompt, ANSWER * times, reward=float(i)) for i, times in enumerate(TIMES)]
    settings = {"learning_rate": RATE, "weight_decay": 0.0, "eps": EPS, "betas": BETAS}
    trainer = trainer_of(folder / "model", precision="fp32", zero_stage=zero_stage, **settings)
    before = weights_of(trainer)
    trainer.train(1, rollouts)
    after = weights_of(trainer)
    try:
        trl_step(model, [one.reward for one in rollouts], folder, seen(torch.tensor([prompt]), model, folder / "model"))
    except Exception as error:  # whatever it is: of TRL, or of its use here
        raise TrlFailed(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return furthest(after, {f"decoder.{n}": p for n, p in model.named_parameters()}), furthest(after, before)


def trl_step(model: Any, rewards: list[float], folder: Path, prompt: Mapping[str, torch.Tensor]) -> None:
    """Change the model by one step of TRL's loss. prompt: one row as the model takes it, with pixels of images."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), loss_type="bnpo", beta=0.0, router_aux_loss_coef=0.0,
        num_generations=len(TIMES), use_cpu=True, disable_dropout=True,
        per_device_train_batch_size=len(TIMES), report_to=[], gradient_checkpointing=False, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **unused: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(TIMES)}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", trust_remote_code=False),
    )
    longest = len(ANSWER) * max(TIMES)
    rows = [ANSWER * times + [0] * (longest - len(ANSWER) * times) for times in TIMES]
    masks = [[1] * (len(ANSWER) * times) + [0] * (longest - len(ANSWER) * times) for times in TIMES]
    given = torch.tensor(rewards, dtype=torch.float64)
    pictures: dict[str, Any] = {}
    if "pixel_values" in prompt:
        pictures = {name: prompt[name].repeat(len(TIMES), 1) for name in ("pixel_values", "image_grid_thw")}
        types = torch.nn.functional.pad(prompt["mm_token_type_ids"], (0, longest)).repeat(len(TIMES), 1)
        pictures |= {"num_images": [1] * len(TIMES), "mm_token_type_ids": types}
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    loss = trainer._compute_loss(
        model,
        {
            "prompt_ids": prompt["input_ids"].repeat(len(TIMES), 1),
            "prompt_mask": torch.ones(len(TIMES), prompt["input_ids"].shape[1], dtype=torch.long),
            **pictures,
            "completion_ids": torch.tensor(rows),
            "completion_mask": torch.tensor(masks),
            "advantages": ((given - given.mean()) / (given.std() + 1e-6)).float(),
        },
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0).step()


if __name__ == "__main__":
    sys.exit(main())
