"""Conversations that an agent has, and what must hold of what is trained of them."""

import random

from nanodag.rl.environments.sample import Sample
from nanodag.rl.environments.transcript import Transcript
from nanodag.rl.rollouts.rollout import prompt_span
from tests.rl.fakes import completion

QUESTION = {"role": "user", "content": "What is 1+1?"}


def base(**values):
    limits = {"max_sampled": 99, "max_tokens": 999}
    return Sample(**({"record": {}, "spans": (prompt_span([1]),), "seed": 5} | limits | values))


def said(text, calls=()):
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def talked(renderer, encoding, seed):
    """An agent that asks at random: it goes on with one of its conversations, or begins another. What it was answered,
    with the ids that were asked, and the sample."""
    transcript, draw = Transcript(renderer, encoding), random.Random(seed)
    ordinary = [token for token in range(encoding.size) if token not in encoding.special_ids]
    told, conversations = [], [[QUESTION]]
    for number in range(draw.randint(1, 8)):
        messages = draw.choice(conversations)
        asked = transcript.asked(messages)
        is_cut = draw.random() < 0.3
        ids = draw.choices(ordinary, k=draw.randint(1, 6)) + ([] if is_cut else [renderer.stop_ids[0]])
        answer = completion(ids, "length" if is_cut else "stop")
        message = said(encoding.decode([token for token in ids if token not in encoding.special_ids]))
        transcript.answered(asked, answer, message)
        told.append((asked, ids))
        goes_on = [*messages, message, {"role": "user", "content": f"{number}?"}]
        conversations += [goes_on, [{"role": "user", "content": f"{number}!"}]]
    return told, transcript.sample(base())


def num_continued(renderer, encoding, num_seeds: int) -> int:
    """How often a conversation of random ones was continued. Each sampled token is trained once, behind the very ids
    that it was sampled from."""
    count = 0
    for seed in range(num_seeds):
        told, sample = talked(renderer, encoding, seed)
        trained = []
        for sequence in (sample, *sample.branches):
            assert [span.kind for span in sequence.spans[:2]] == ["prompt", "sampled"]
            for place, span in enumerate(sequence.spans):
                if span.kind == "sampled":
                    before = tuple(token for one in sequence.spans[:place] for token in one.token_ids)
                    trained.append((before, span.token_ids))
        assert sorted(trained) == sorted((asked.ids, tuple(ids)) for asked, ids in told)
        assert sample.last_turn == tuple(told[-1][1])
        count += sum(asked.sequence is not None for asked, _ in told)
    return count
