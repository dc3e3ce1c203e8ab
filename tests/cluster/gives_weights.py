"""A trainer's rank 0 and a sampler beside it, which give weights to one on another node:

    python -m tests.cluster.gives_weights MODELS URL OUT

MODELS: three folders. What samplers then held, and who listened where, goes to OUT as JSON.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from nanodag.engines.fleet import Fleet
from nanodag.engines.start import ServerProcess, start_engine
from nanodag.inference.client import SamplerClient
from nanodag.inference.engine_settings import EngineSettings
from nanodag.rl.sync.broadcast_sync import DistributedSync
from tests.fault.processes import listening
from tests.rl.broadcasts import Trainer

CUT_S = 3.0


class Elsewhere:
    """A server that somebody else runs."""

    pid, is_alive = 0, True

    def __init__(self, url: str) -> None:
        self.url = url

    def kill(self) -> None: ...

    stop = kill

    def tail(self) -> str:
        return ""


def no_launch(*_: object) -> ServerProcess:
    raise AssertionError("a sampler was lost")


def cut_the_link() -> None:
    """For some seconds, from now on."""
    subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
    mend = ["ip", "link", "set", "cable", "up"]
    threading.Timer(CUT_S, lambda: subprocess.run(mend, check=True)).start()


async def work(models: list[Path], url: str, folder: Path) -> dict[str, object]:
    trainer = Trainer(models[1])
    here = start_engine(
        EngineSettings(model=models[0], weight_version=0, max_batch=2, context_length=64),
        log_path=folder / "beside.log",
    )
    samplers = Fleet([here, Elsewhere(url)], model=models[0], version=0, launch=no_launch, connect=SamplerClient)
    sync = DistributedSync(samplers, trainer.ask, check_every=1, timeout_s=60.0, is_beside=True)
    found: dict[str, object] = {}
    try:
        await sync.load(folder / "policy-1", 1)
        found["both"] = await samplers.fingerprints()
        found["listening"] = sorted({address for _, address in listening(os.getpid())})
        (_, there) = await samplers.members()
        await sync.give(there.client, models[2], 7)
        found["folder"] = await there.client.fingerprints()
        await sync.give(there.client, folder / "policy-1", 1)
        found["kept"] = await there.client.fingerprints()
        trainer.weights.take(models[2])
        count = iter(range(100))
        trainer.weights.before = lambda names: cut_the_link() if next(count) == 3 else None
        began = time.monotonic()
        await sync.load(folder / "policy-2", 2)
        found["took"] = time.monotonic() - began
        found["after"] = await samplers.fingerprints()
        found["asked"] = trainer.asked
    finally:
        trainer.giver.close()
        await samplers.disconnect()
        samplers.close()
    return found


def main() -> None:
    *models, url, out = sys.argv[1:]
    found = asyncio.run(work([Path(model) for model in models], url, Path(out).parent))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
