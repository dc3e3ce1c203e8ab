"""Engines and fleets of them: started, watched, replaced, given weights and ended, for RL, evaluation and serving."""
