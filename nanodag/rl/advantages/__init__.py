"""Advantages: how much better than others a rollout was.

Contract of an entry: `fn(rewards, group_ids, num_tokens) -> advantages`, all (B,): float32, int64, int64, float32.
num_tokens: trained tokens of each rollout. B is every rollout of the step, on every rank. Members of a group need not
be adjacent and groups may differ in size. When all rewards of the batch are equal, every advantage is exactly 0. Within
a group a higher reward never gets a lower advantage.

Entries that look at one group at a time (`grpo`, `dr_grpo`, `rloo`) give exactly 0 to each group whose rewards are all
equal, one of a single member included: it carries no signal. Those that normalise over the batch
(`reinforce_pp`, `reinforce_pp_baseline`) do not.

`gae` has a contract of its own, a number a token: it stands in its file. So has `grpo` over a process reward, which
scores single steps of a response (process.py).
"""
