"""Rewards: how good a completion is. No torch here.

Contract of an entry: `fn(prompt, completion) -> Reward | float`. prompt: the canonical record (nanodag.data.records):
messages, answer, reward, metadata. completion: the text of what was sampled, special tokens left out. Entries run in
processes of their own with a time limit (reward_pool.py); one that raises or hangs fails its sample with a reason, not
the run. Several are added up by weight (reward.py). One that is made from an argument (`model:FOLDER`) is an object
that is called the same way, or has `score_batch(samples) -> list[Reward | reason]` (`remote:URL`, `judge:FILE`).
"""
