"""The controller's side starts without torch: it lives beside trainer and sampler, and each of them brings its own."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "sympy")


def test_the_controller_imports_nothing_heavy():
    code = (
        "import sys, nanodag.rl.control.controller, nanodag.rewards.pool_process, nanodag.rewards.text_rewards;"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
