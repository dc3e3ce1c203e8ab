"""What mirroring checkpoints costs the steps of a stage: `python -m benchmarks.checkpoint_mirror [--rounds 3]`.

`pocket`'s pretraining, with a checkpoint every --every steps, in a store on an S3 server (moto's, on this host at the
lowest priority), with and without `store.mirror_checkpoints`, in turns. Compared is the mean wall time of a step from
the first checkpoint to the last, what is written between them included. A machine of two cores is the worst case: the
stage uses both.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanodag.host.ports import free_port
from nanodag.run.build_stage import build_stage
from nanodag.run.record import open_run

STAGE = "pretrain"


def serve(folder: Path) -> subprocess.Popen[bytes]:
    """An S3 server with one bucket; this process's environment names it from here on."""
    port = free_port()
    command = ["nice", "-n", "19", sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(port)]
    process = subprocess.Popen(command, stdout=(folder / "moto.log").open("wb"), stderr=subprocess.STDOUT)
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    else:
        process.kill()
        raise SystemExit("moto's server did not come up: " + (folder / "moto.log").read_text()[-2000:])
    import s3fs

    s3fs.S3FileSystem().mkdir("bucket")
    return process


def step_seconds(folder: Path, options: argparse.Namespace, *, seed: int, mirrored: bool) -> float:
    """Mean wall seconds of a step; seed: makes the key new, so that nothing is found."""
    overrides = [f"{STAGE}.max_steps={options.steps}", f"{STAGE}.checkpoint_every={options.every}"]
    overrides += [
        f"{STAGE}.log_every=1",
        "store.url=s3://bucket/store",
        f"store.local={folder}/local",
        f"{STAGE}.seed={seed}",
    ]
    overrides += [f"store.mirror_checkpoints={str(mirrored).lower()}", f"{STAGE}.sample_prompts=[]"]
    run = open_run(f"{'mirrored' if mirrored else 'plain'}-{seed}", file="", preset="pocket", overrides=overrides)
    tokenizer = build_stage(run, "tokenizer", {})
    found = build_stage(run, STAGE, {"tokenizer": tokenizer})
    records = run.store.verified(run.store.attempt(found.key, found.attempt), "records") / "metrics.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines if line["event"] == "step"}
    first, last = options.every, options.steps // options.every * options.every
    return (times[last] - times[first]) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=161)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        server = serve(Path(name))
        try:
            ratios = []
            for number in range(options.rounds):
                plain, mirrored = (
                    step_seconds(Path(name), options, seed=2 * number + choice, mirrored=choice)
                    for choice in (False, True)
                )
                ratios.append(mirrored / plain)
                print(f"round {number + 1}: {plain:.3f} s, mirrored {mirrored:.3f} s: {ratios[-1]:.3f}", flush=True)
            print(f"median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        finally:
            server.kill()


if __name__ == "__main__":
    main()
