"""Writers of one store that are killed at random: `publishing.py URL FOLDER NUM_KILLS SEED`.

Two writers at a time publish, edit a run's record and commit checkpoints, until SIGKILL or SIGTERM ends them; a reader
reads all the while. After each kill everything that is new is read and compared. Prints JSON; ends with an exception at
the first thing that is not as it should be. It forks and does not start Python, so a kill costs milliseconds.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nanodag.children.tree import killed_with_parent
from nanodag.errors import ArtifactNotFound, NanodagError
from nanodag.host.folders import PROJECT
from nanodag.store import Checkpoints, Store
from tests.run_records import run_record

KEY = "a" * 40
ABOUT = {"kind": "k", "stage": "s", "config": {}, "lineage": {}, "sources": {}, "cost": {}, "environment": {}}


def kill_at_random(url: str, folder: Path, num_kills: int) -> dict[str, Any]:
    """What this program prints, run in a process of its own."""
    command = [sys.executable, __file__, url, str(folder), str(num_kills), "7"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_for_ever(url: str, folder: Path, seed: int, name: str) -> None:
    """Publish products whose bytes follow from a number that their manifest has."""
    store = Store(url, local=folder / "here")  # drivers of remote stores do not outlive a fork
    source = random.Random(seed)
    checkpoints = Checkpoints(folder / f"checkpoints-{name}")
    newest = checkpoints.newest_valid()
    for number in itertools.count():
        product = folder / f"product-{os.getpid()}-{number}"
        product.mkdir()
        mark = source.randrange(1 << 30)
        for file in range(source.randrange(1, 6)):
            (product / f"file-{file}").write_bytes(random.Random(mark + file).randbytes(source.randrange(1, 30_000)))
        store.publish(KEY, product, metrics={"mark": mark}, records=product, **ABOUT)
        store.change_run("r", lambda record: record.changed(ended=record.ended + 1))
        step = (newest[0] if newest else 0) + number + 1
        (checkpoints.begin(step) / "state").write_text(str(step) * 1000)
        checkpoints.commit(step)


def read_for_ever(url: str, folder: Path) -> None:
    store = Store(url, local=folder / "reader")
    while True:
        artifact = store.lookup(KEY)
        if artifact is not None:
            check(store, artifact)
        store.read_run("r")


def check(store: Store, artifact: object) -> None:
    """An artifact's bytes are those that its writer meant."""
    folder = store.materialize(artifact)
    for name in artifact.files:
        found = (folder / name).read_bytes()
        expected = random.Random(artifact.metrics["mark"] + int(name[-1])).randbytes(len(found))
        assert found == expected, f"{artifact.folder}/{name} has other bytes than its writer meant"


def forked(body: object, *arguments: object) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            killed_with_parent(parent)
            body(*arguments)
        except (NanodagError, OSError, AssertionError, LookupError, ValueError) as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:  # a child must not return into its parent's loop
            os._exit(1)
    return pid


def read_new(store: Store, seen: set[str]) -> int:
    """Check the attempts that were not seen before; returns how many there were."""
    new = [name for name in store.attempts(KEY) if name not in seen]
    num_whole = 0
    for name in new:
        try:
            check(store, store.attempt(KEY, name))
            num_whole += 1
        except ArtifactNotFound:
            assert store.is_remote, "a local attempt is there with its manifest or not at all"
        seen.add(name)
    return num_whole


def first_publish_s(store: Store, url: str, folder: Path, seed: int) -> float:
    """Seconds that a writer takes on this machine, now, from its start until its first product can be read."""
    began = time.monotonic()
    writer = forked(write_for_ever, url, folder, seed, "x")
    try:
        while store.lookup(KEY) is None:
            assert os.waitpid(writer, os.WNOHANG) == (0, 0), "a writer ended by itself"
            assert time.monotonic() < began + 120.0, "nothing is published"
            time.sleep(0.02)
        return time.monotonic() - began
    finally:
        end(writer)


def end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(url: str, folder: Path, num_kills: int, seed: int) -> None:
    source = random.Random(seed)
    store = Store(url, local=folder / "here")
    store.write_run(run_record("r"))
    seen: set[str] = set()
    longest_s = max(0.02, 2 * first_publish_s(store, url, folder, seed))  # between a writer's start and its end
    first = num_whole = read_new(store, seen)
    highest, count, steps = 0, 0, {"x": 0, "y": 0}
    reader = forked(read_for_ever, url, folder)
    try:
        for kill in range(num_kills):
            names = ["x", "y"] if kill % 2 else ["x"]
            writers = [forked(write_for_ever, url, folder, source.randrange(1 << 30), name) for name in names]
            for writer in writers:
                time.sleep(source.uniform(0.0, longest_s))
                os.kill(writer, source.choice([signal.SIGKILL, signal.SIGTERM]))
            for writer in writers:
                _, status = os.waitpid(writer, 0)
                assert os.WIFSIGNALED(status), "a writer ended by itself"
            num_new = read_new(store, seen)
            num_whole += num_new
            # However fast the machine is, some kills come before a publish is through and some behind it.
            longest_s = max(0.02, longest_s * 0.9) if num_new else min(5.0, longest_s * 1.3)
            newest = store.lookup(KEY)
            assert (newest is not None) == (num_whole > 0)
            if newest is not None:
                assert int(newest.attempt[:4]) >= highest, "an older attempt became the newest"
                highest = int(newest.attempt[:4])
            found = store.read_run("r").ended
            assert found >= count, "a run's record went back"
            count = found
            for name in names:
                step, path = Checkpoints(folder / f"checkpoints-{name}").newest_valid() or (0, None)
                assert step >= steps[name], "a checkpoint was lost"
                assert path is None or (path / "state").read_text() == str(step) * 1000
                steps[name] = step
        assert os.waitpid(reader, os.WNOHANG) == (0, 0), "the reader met something that it could not read"
    finally:
        end(reader)
    print(json.dumps({"kills": num_kills, "published": num_whole - first, "edits": count, "steps": steps}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
