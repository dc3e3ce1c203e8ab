"""`python -m nanodag.train.torchrun`: torchrun, whose rendezvous listens on its own address only, and which leaves
neither ranks nor files when it is killed.

torch.distributed.run makes its TCPStore listen on every address of the machine, and has no option for another way.
"""

import os
import sys

import torch.distributed

from nanodag.children.tree import STARTER
from nanodag.host.folders import Scratch
from nanodag.inference.bound_store import BoundStore


def main() -> None:
    """Run torch.distributed.run with its arguments."""
    # Before the modules that take it from there are imported.
    torch.distributed.TCPStore = BoundStore  # type: ignore[misc] # a class is replaced on purpose
    from torch.distributed.run import main as run

    os.environ[STARTER] = str(os.getpid())
    with Scratch("torchrun") as folder:
        run(["--log-dir", str(folder), *sys.argv[1:]])


if __name__ == "__main__":
    main()
