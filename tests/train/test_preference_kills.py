"""SIGKILL at random moments: preference stages and reward models end on the bytes of one that nobody killed."""

import random
import signal
import time

import pytest

from tests.train import forks, stages

KILLS = 2  # of each stage: 20 over all
SETTINGS = [(kind, 1, 0) for kind in ("preference", "reward_model")] + [
    (kind, 2, zero_stage) for kind in ("preference", "reward_model") for zero_stage in (0, 1, 2, 3)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    stages.write_inputs(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_ranks", "zero_stage"), SETTINGS)
def test_a_stage_killed_at_random_ends_on_the_same_bytes(folder, kind, num_ranks, zero_stage):
    settings = stages.preference(folder, kind=kind, zero_stage=zero_stage, checkpoint_every=2)
    settings |= {"resources": {**stages.RESOURCES, "num_ranks": num_ranks}}
    name = f"{kind}-{num_ranks}-{zero_stage}"
    whole, killed = (
        stages.make_job(folder / f"{name}-{what}" / "work", settings, {"model": folder / "model"})
        for what in ("whole", "killed")
    )
    began = time.monotonic()
    assert set(forks.end(forks.start(whole, num_ranks=num_ranks))) == {0}
    took, draw, num_killed = time.monotonic() - began, random.Random(name), 0
    while num_killed < KILLS:
        ranks = forks.start(killed, num_ranks=num_ranks)
        time.sleep(draw.uniform(0, took))
        draw.choice(ranks).send_signal(signal.SIGKILL)  # the others are ended, as torchrun does
        codes = forks.end(ranks)
        assert -signal.SIGKILL in codes or set(codes) == {0}, (killed / "worker.log").read_text()[-6000:]
        num_killed += -signal.SIGKILL in codes
        if set(codes) == {0}:  # it was done before: from its begin again
            (killed / "result.json").unlink(missing_ok=True)
            took *= 0.8
    forks.end(forks.start(killed, num_ranks=num_ranks))
    assert stages.content(killed / "output") == stages.content(whole / "output")
