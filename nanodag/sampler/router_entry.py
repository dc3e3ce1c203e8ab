"""Runs sglang-router, in SGLang's own environment: `<its python> router_entry.py PARENT -- OPTIONS`.

`python -m sglang_router.launch_router` imports SGLang for its tracing, which a CPU build of torch does not survive; the
router itself needs nothing of it. Ends when the process of that number ends, which started it. This file may import
nothing of nanodag.
"""

import argparse
import os
import sys
import threading
import time

POLL_S = 0.5


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def main() -> None:
    """Serve until a signal ends it."""
    split = sys.argv.index("--")
    own, options = sys.argv[1:split], sys.argv[split + 1 :]
    threading.Thread(target=_end_with_parent, args=(int(own[0]),), daemon=True).start()
    try:
        from sglang_router.router import Router
        from sglang_router.router_args import RouterArgs
    except ModuleNotFoundError as error:
        sys.exit(f"{error} in {sys.executable}: install sglang-router==0.3.2 there, or set sampler.router: false")
    parser = argparse.ArgumentParser(prog="sglang-router")
    RouterArgs.add_cli_args(parser)
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args(options))).start()


if __name__ == "__main__":
    main()
