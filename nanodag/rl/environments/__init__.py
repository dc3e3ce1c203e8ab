"""Environments: the other side of a policy's turns. `rl.generate` names one, and all have one protocol.

Contract of an entry: `async def generate(sampler, sample, **options) -> Sample | sequence of Samples`.

sampler: TurnSampler; sample: Sample, which has the prompt alone, one call for each of `samples_per_prompt`, and one for
each held-out prompt, greedily. Options come from the config, keyword only. The returned samples are judged and trained
in one group with those of the other calls, so a group may have any size. Only tokens that `sampler.turn` sampled are
trained; every other token is a tool token. Text is never tokenised again: a turn continues from the ids.

Exact resume needs the same result for the same sample and weights: draw random numbers from `sample.seed`, and do not
look at the clock. A function that raises, hangs or returns something that cannot be trained fails its sample with the
reason. Where it runs, and an example, is in docs/how-to/environment.md.
"""
