"""A stage whose weights come while rollouts are under way, and what must hold of it, whichever sampler it has."""

from nanodag.rl.rollouts.rollout import read_lines, read_rollouts
from tests.rl.stages import metrics

SETTINGS = {
    "max_staleness": 2,
    "correction": "tis",
    "num_steps": 5,
    "prompts_per_step": 4,
    "max_new_tokens": 100,
    "learning_rate": 1e-3,
    "micro_batch_tokens": 2048,
    "eval_every": 2,
    # four samples at once, so that a rollout batch takes longer than a step
    "sampler": {"context": 128, "max_batch": 4, "deterministic": False},
}


def check_that_responses_went_on(job):
    steps = metrics(job)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    num_versions = []
    for number in range(1, 6):
        for rollout in read_rollouts(job.records / "rollouts" / f"step-{number:08d}.jsonl"):
            (span,) = rollout.spans[1:]
            assert len(span.token_ids) == 100 or rollout.finish_reason == "stop"
            assert list(span.versions) == sorted(span.versions)
            assert number - 3 <= min(span.versions) and max(span.versions) < number
            num_versions.append(len(set(span.versions)))
    assert len(num_versions) >= 5 * 4 * 3 and max(num_versions) > 1
    ledger = list(read_lines(job.records / "ledger.jsonl"))
    assert len(ledger) == len({(entry["prompt_id"], entry["epoch"]) for entry in ledger}) >= 5 * 4
