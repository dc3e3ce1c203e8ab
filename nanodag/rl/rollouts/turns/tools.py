"""The loop of a policy that calls a tool, in nanodag's own chat format: its tokens say where a call begins and ends."""

from collections.abc import Callable
from dataclasses import replace

from nanodag.rl.rollouts.turns.sample import Sample, TurnSampler
from nanodag.tokenizer.chat import NativeRenderer

CHARACTERS_A_TOKEN = 16  # more than nearly every token has: what is longer is cut before it is tokenised


async def with_tool(
    sampler: TurnSampler, sample: Sample, tool: Callable[[str], str], *, max_calls: int, max_result_tokens: int
) -> Sample:
    """Let the policy speak, answer each call that it makes, until it ends its speech.

    tool: text of a call to text of its result; what it raises fails the sample. A result is cut to max_result_tokens
    tokens. A sample that makes one more call than max_calls, or whose result leaves no room, ends as cut off, without
    that result.
    """
    renderer = sampler.renderer
    assert isinstance(renderer, NativeRenderer)  # nanodag.rl.rollouts.turns.runner refuses others
    for number in range(max_calls + 1):
        sample = await sampler.turn(sample, stop_token_ids=[renderer.call_end])
        if sample.last_turn[-1:] != (renderer.call_end,):
            return sample
        if number == max_calls:
            break
        result = tool(renderer.tool_call(sample.last_turn) or "")[: CHARACTERS_A_TOKEN * max_result_tokens]
        opening, *inner, ending = renderer.tool_result(result)
        answered = sample.with_tool([opening, *inner[:max_result_tokens], ending])
        if not answered.room:
            break
        sample = answered
    return replace(sample, finish_reason="length")
