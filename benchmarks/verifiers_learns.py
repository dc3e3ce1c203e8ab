"""What pocket's model learns in `boxes/boxes.py`, an environment of the `verifiers` package with a tool: held-out tasks
before RL and after it, over seeds.

    nanodag env install verifiers
    python -m benchmarks.verifiers_learns --store /tmp/verifiers-store \
        --out verifiers.json --models 0=MODEL_FOLDER 1=MODEL_FOLDER 2=MODEL_FOLDER

`gains.py` says what a model is, and how the difference is made. SFT teaches to open one box, and the other one now and
then where it was empty. RL finds that it is worth to go on. Prints JSON a seed.
"""

from pathlib import Path
from typing import Any

from benchmarks.gains import learn, parser, stages_of

FILES = Path(__file__).with_name("boxes")


def rl_stage(*, steps: int) -> dict[str, Any]:
    """RL in the environment."""
    return {
        "data": ["verifiers:boxes?size=4000&seed=2"],
        "sampler": {"max_batch": 128, "context": 64},
        "num_steps": steps,
        "rollout": {
            "generate": {"name": "verifiers:boxes", "options": {"agent.max_turns": 4, "at_once": 128}},
            "prompts_per_step": 12,
            "samples_per_prompt": 8,
            "max_new_tokens": 24,
        },
        "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.0, "warmup_steps": 2},
        "evaluation": {
            "eval_every": steps,
            "eval_prompts": 100,
            "validation": ["verifiers:boxes?size=100&seed=9&held_out=true"],
        },
    }


def main() -> None:
    arguments = parser(__doc__, steps=8, port=4340).parse_args()
    stages = stages_of("python:box_numbers:calls?size=800&seed=1", rl_stage(steps=arguments.steps))
    learn("boxes", stages, FILES, arguments)


if __name__ == "__main__":
    main()
