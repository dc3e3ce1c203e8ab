"""Functions that write a response in several turns, with tools between them, or make several samples of one.

Contract of an entry: `async def generate(sampler, sample, **options) -> Sample | sequence of Samples`.

    async def twice(sampler, sample, *, question: str = "Are you sure?"):
        sample = await sampler.turn(sample)
        sample = sample.with_tool(sampler.encode(question))
        return await sampler.turn(sample)

sampler: TurnSampler; sample: Sample, which has the prompt alone, one call for each of `samples_per_prompt`, and one for
each held-out prompt, greedily. Options come from the config, keyword only. The returned samples are judged and trained
in one group with those of the other calls, so a group may have any size. Only tokens that `sampler.turn` sampled are
trained; every other token is a tool token. Text is never tokenised again: a turn continues from the ids.

Exact resume needs the same result for the same sample and weights: draw random numbers from `sample.seed`, and do not
look at the clock. A function that raises, hangs or returns something that cannot be trained fails its sample with the
reason. Its module is imported once, in a process of its own; each call has a fork of that, so it may block, and what
it changes there no other call sees.
"""
