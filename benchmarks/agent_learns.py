"""What pocket's model learns by the agent of `agent/range_agent.py`, written with the `openai` package: held-out
problems before RL and after it, over seeds.

    python -m venv /tmp/agents-env && /tmp/agents-env/bin/pip install openai
    python -m benchmarks.agent_learns --python /tmp/agents-env/bin/python --store /tmp/agent-store \
        --out agent.json --models 0=MODEL_FOLDER 1=MODEL_FOLDER 2=MODEL_FOLDER

`gains.py` says what a model is, and how the difference is made. Prints JSON a seed.
"""

from pathlib import Path
from typing import Any

from benchmarks.gains import learn, parser, stages_of

FILES = Path(__file__).with_name("agent")


def rl_stage(python: str, *, steps: int) -> dict[str, Any]:
    """RL by the agent. python: the interpreter of the agent."""
    held_out = {"url": "python:range_problems:problems?size=200&seed=9&held_out=true", "adapter": "problem"}
    agent = {"python": python, "seconds": 120.0, "max_calls": 8, "at_once": 4}
    return {
        "data": [{"url": "python:range_problems:problems?size=20000&seed=2", "adapter": "problem"}],
        "reward": "reported",
        "sampler": {"max_batch": 64, "context": 96},
        "num_steps": steps,
        "rollout": {
            "generate": {"name": "agent:range_agent:answer_range", "options": agent},
            "prompts_per_step": 16,
            "samples_per_prompt": 8,
            "max_new_tokens": 24,
        },
        "optimizer": {"learning_rate": 3e-4, "weight_decay": 0.0, "warmup_steps": 3},
        "evaluation": {"eval_every": 30, "eval_prompts": 200, "validation": [held_out]},
    }


def main() -> None:
    options = parser(__doc__, steps=30, port=4330)
    options.add_argument("--python", required=True, help="an interpreter that has the package openai")
    arguments = options.parse_args()
    rl = rl_stage(arguments.python, steps=arguments.steps)
    learn("agent", stages_of("python:range_problems:calls?size=400&seed=1", rl), FILES, arguments)


if __name__ == "__main__":
    main()
