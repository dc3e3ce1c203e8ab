"""Functions that write a response in several turns, with tools between them, or make several samples of one.

Contract of an entry: `async def generate(sampler, sample, **options) -> Sample | sequence of Samples`.

    async def twice(sampler, sample, *, question: str = "Are you sure?"):
        sample = await sampler.turn(sample)
        sample = sample.with_tool(sampler.encode(question))
        return await sampler.turn(sample)

sampler: TurnSampler; sample: Sample, which has the prompt alone, one call for each of `samples_per_prompt`, and one for
each held-out prompt, greedily. Options come from the config, keyword only. What is returned are the samples that are
judged and trained, of one group with those of the other calls, so a group may have any size. Only what `sampler.turn`
sampled is trained; every other token is a tool token. Text is never tokenised again: a turn goes on from the ids.

The same result whenever it is called with the same sample and weights is what exact resume asks for: draw random
numbers from `sample.seed`, and do not look at the clock. A function that raises, hangs or returns what cannot be
trained fails its sample with the reason. It runs in a thread of the controller with an event loop of its own, so it may
block; what it may not do is end the process, or hold Python's interpreter lock in C code.
"""
