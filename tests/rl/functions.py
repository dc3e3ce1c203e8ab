"""Functions that generate, named by import path as a user's. They run in processes that import nothing heavier."""

import asyncio
from dataclasses import replace

from nanodag.rl.environments.transcript import Conversation


async def twice(sampler, sample, *, said: str = "sure?"):
    sample = await sampler.turn(sample, max_tokens=4)
    return await sampler.turn(sample.with_tool(sampler.encode(said)))


async def one(sampler, sample):
    return await sampler.turn(sample)


async def asked_again(sampler, sample):
    conversation, messages = Conversation(sampler, sample), list(sample.record["messages"])
    answer = await conversation.answer(messages)
    await conversation.answer([*messages, answer, {"role": "user", "content": "sure?"}])
    return conversation.sample()


async def fanned_out(sampler, sample):
    sample = await sampler.turn(sample, max_tokens=2)
    return list(await asyncio.gather(*(sampler.turn(one) for one in sample.forked(3))))


async def answered_itself(sampler, sample):
    sample = await sampler.turn(sample)
    return type(sample)(**{name: getattr(sample, name) for name in sample.__slots__} | {"answer": "mine"})


async def two_sequences(sampler, sample):
    main = await sampler.turn(sample)
    side = await sampler.turn(sample.beginning(sampler.encode("another")))
    return replace(main, reward=1.0, branches=(side,))


async def an_untrained_role(sampler, sample):
    judge = replace(await sampler.turn(sample.beginning(sampler.encode("judge"))), role="judge", is_trained=False)
    return replace(await sampler.turn(sample), branches=(judge,))


async def a_judge(sampler, sample):
    judge = replace(await sampler.turn(sample.beginning(sampler.encode("judge"))), role="judge", reward=0.25)
    return replace(await sampler.turn(sample), branches=(judge,))
