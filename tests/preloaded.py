"""What tests/forks.py imports before it forks: our workers, and what they import later than at their start."""

import importlib

WORKERS = (
    "nanodag.rl.control.controller",
    "nanodag.rl.trainer.trainer",
    "nanodag.sampler.__main__",
    "nanodag.sampler.generation_server",
    "nanodag.train.__main__",
)
LATE = (
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.muon.original_muon",
    "setuptools",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
)
for name in (*WORKERS, *LATE, "tests.forks"):
    importlib.import_module(name)

from nanodag.train import peak  # noqa: E402

peak.BUDGET_S = 0.01  # of half a second a rank; nobody asks how fast it was
