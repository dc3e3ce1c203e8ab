"""Runs sglang-router, in SGLang's own environment: `<its python> router_entry.py OPTIONS`.

`python -m sglang_router.launch_router` imports SGLang for its tracing, which a CPU build of torch does not survive; the
router itself needs nothing of it. It keeps the interpreter's lock while it serves, so it has a process of its own, and
this one watches the process that started it. All end together. Of nanodag this file may import what needs the standard
library only.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where nanodag is: not installed in SGLang's environment
from nanodag.children.tree import killed_with_parent
from nanodag.inference.server_variables import end_with_starter, take_token

sys.path.pop()


def _serve(options: list[str]) -> None:
    try:
        from sglang_router.router import Router
        from sglang_router.router_args import RouterArgs
    except ModuleNotFoundError as error:
        sys.exit(f"{error} in {sys.executable}: install sglang-router==0.3.2 there, or set sampler.router: false")
    parser = argparse.ArgumentParser(prog="sglang-router")
    RouterArgs.add_cli_args(parser)
    if token := take_token():  # not on the command line, which every user can read
        options = [*options, f"--api-key={token}", f"--control-plane-api-keys=stage:stage:admin:{token}"]
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args(options))).start()


def main() -> None:
    """Serve until a signal ends it, or whoever started it has gone."""
    here = os.getpid()
    if os.fork() == 0:
        killed_with_parent(here)
        _serve(sys.argv[1:])
        return
    end_with_starter()
    os.wait()
    sys.exit(1)


if __name__ == "__main__":
    main()
