"""Environments: the other side of a policy's turns. `rl.generate` names one, and all have one protocol.

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

    runner.py             calls the entry for each sample: time limit, what is returned, failures, lost processes
    sample.py             a sample, and the sampler that adds turns
    transcript.py         what a sample said: messages outside, token ids inside; a policy that is spoken to in messages
    own_function.py       a function of the user's own, in forks of a process that has imported it
    tools.py              a policy with one tool: a calculator, a Python interpreter
    class_environment.py  a class with `reset` and `step` (environment.py), whose episodes are forks;
                          openenv_session.py is one over a server
    agents.py             a function in a fork (agent_fork.py), a program in the sandbox (sandbox_proxy.py), an
                          environment of the `verifiers` package, which ask the policy by OpenAI's API
    api_server.py         the API for all of them; agent_session.py: what one key opens

What an agent has said and heard becomes sequences: each call's ids are kept, with log-probabilities and versions.
"""
