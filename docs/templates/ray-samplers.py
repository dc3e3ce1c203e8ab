"""Samplers of one RL stage on a Ray cluster, each a task with a GPU of its own. Ray starts a lost one again.

    openssl rand -hex 24 > FOLDER/key && chmod 600 FOLDER/key
    ray job submit --no-wait -- python ray-samplers.py FOLDER 8 --model MODEL --engine sglang

FOLDER: on a file system that all nodes mount. 8: how many. What follows goes to `nanodag sampler serve`. The stage
follows the file that this writes: set rl.sampler.urls_file to FOLDER/servers, in the pipeline file. GPUS: of each, 1 by
default.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import ray


@ray.remote(num_gpus=float(os.environ.get("GPUS", "1")), num_cpus=1, max_retries=-1)
def serve(folder: Path, number: int, arguments: list[str]) -> None:
    """Run a server on this node until it ends; its line is a file in the folder meanwhile."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    command = ["nanodag", "sampler", "serve", "--host", "0.0.0.0", "--port", str(port)]
    line = folder / "servers.d" / str(number)
    line.write_text(f"http://{ray.util.get_node_ip_address()}:{port} {folder}/key\n")
    try:
        subprocess.run([*command, "--api-key-file", str(folder / "key"), *arguments], check=True)
    finally:
        line.unlink(missing_ok=True)


def main() -> None:
    folder, count, arguments = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    lines = folder / "servers.d"
    lines.mkdir(exist_ok=True)
    tasks = [serve.remote(folder, number, arguments) for number in range(count)]
    listed = ""
    while tasks:
        text = "".join(path.read_text() for number in range(count) if (path := lines / str(number)).exists())
        if text != listed:
            (folder / "servers.new").write_text(text)
            (folder / "servers.new").replace(folder / "servers")
            listed = text
        ended, tasks = ray.wait(tasks, timeout=2)
        ray.get(ended)  # raises what a server ended with


if __name__ == "__main__":
    main()
