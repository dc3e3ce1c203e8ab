"""What tests/forks.py imports before it forks: our workers, and what they import later than at their start."""

import nanodag.rl.control.controller
import nanodag.rl.losses.corrections
import nanodag.rl.losses.policy_loss
import nanodag.rl.losses.ppo_clip
import nanodag.rl.trainer.trainer
import nanodag.sampler.__main__
import nanodag.sampler.server
import nanodag.train.__main__  # noqa: F401
from nanodag.train import peak

peak.BUDGET_S = 0.01  # of half a second a rank; nobody asks how fast it was
