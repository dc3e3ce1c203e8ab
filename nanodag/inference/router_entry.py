"""Runs sglang-router, in SGLang's own environment: `<its python> router_entry.py PARENT -- OPTIONS`.

`python -m sglang_router.launch_router` imports SGLang for its tracing, which a CPU build of torch does not survive; the
router itself needs nothing of it. It keeps the interpreter's lock while it serves, so it has a process of its own, and
this one looks whether the process of that number, which started it, is still there. All end together. This file may
import nothing of nanodag.
"""

import argparse
import ctypes
import os
import signal
import sys
import time

POLL_S = 0.2
TOKEN_VARIABLE = "NANODAG_SAMPLER_TOKEN"  # nanodag.inference.doors
PR_SET_PDEATHSIG = 1


def _serve(options: list[str]) -> None:
    try:
        from sglang_router.router import Router
        from sglang_router.router_args import RouterArgs
    except ModuleNotFoundError as error:
        sys.exit(f"{error} in {sys.executable}: install sglang-router==0.3.2 there, or set sampler.router: false")
    parser = argparse.ArgumentParser(prog="sglang-router")
    RouterArgs.add_cli_args(parser)
    if token := os.environ.pop(TOKEN_VARIABLE, ""):  # not on the command line, which every user can read
        options = [*options, f"--api-key={token}", f"--control-plane-api-keys=stage:stage:admin:{token}"]
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args(options))).start()


def main() -> None:
    """Serve until a signal ends it, or whoever started it has gone."""
    split = sys.argv.index("--")
    parent, options = int(sys.argv[1]), sys.argv[split + 1 :]
    here = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux: the child ends with this process
        if os.getppid() != here:  # which ended before that was asked for
            sys.exit(1)
        _serve(options)
        return
    while os.getppid() == parent:
        if os.waitpid(child, os.WNOHANG)[0]:
            sys.exit(1)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
