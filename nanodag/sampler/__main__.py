"""``python -m nanodag.sampler --model-path DIR --port N``: serve a checkpoint over HTTP until SIGTERM.

With ``--port 0`` the system chooses one; ``--ready-file`` receives ``{"port": N, "pid": N}``, whole and once, when the
server answers.
"""

import argparse
import json
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn

from nanodag.errors import BadRequest, MissingTool
from nanodag.inference.access_checks import DEFAULT_MAX_BODY_BYTES, Doors
from nanodag.inference.server_variables import end_with_starter, take_token
from nanodag.model.architecture import read_checkpoint
from nanodag.sampler.sizes import DEFAULT_CACHE_BYTES

log = logging.getLogger("nanodag.sampler")

KEEP_ALIVE_S = 3600


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nanodag.sampler", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model-path", required=True, help="folder of a Hugging Face checkpoint (Llama, Qwen2 or Qwen3)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0: the system chooses")
    add("--allow-host", action="append", default=[], metavar="NAME", help="of this machine, beside its own")
    add("--ready-file", type=Path, help="where to write the port and pid when the server answers")
    add("--dtype", default="auto", help="auto, float32 or bfloat16")
    add("--device", default="cpu")
    add("--max-running-requests", type=int, default=64, help="samples that run at once")
    add("--context-length", type=int, help="prompt and answer together; by default what the cache has room for")
    add("--cache-bytes", type=int, default=DEFAULT_CACHE_BYTES, help="most that keys and values may take")
    add("--deterministic", action="store_true", help="the same bits for a request whoever runs beside it")
    add("--threads", type=int, default=1, help="torch threads")
    add("--random-seed", type=int, default=0, help="for requests without sampling_seed")
    add("--weight-version", default="default")
    add("--stream-every-s", type=float, default=0.0, help="what a stream reports at most; 0: every token")
    add("--max-body-bytes", type=int, default=DEFAULT_MAX_BODY_BYTES, help="of a request; more is answered 413")
    add("--max-text-bytes", type=int, default=1 << 20, help="of a request's prompts that are given as text")
    return parser.parse_args(arguments)


class _Server(uvicorn.Server):
    """uvicorn, telling that it is ready."""

    def __init__(self, config: uvicorn.Config, ready_file: Path | None, port: int) -> None:
        super().__init__(config)
        self._ready_file = ready_file
        self._port = port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("ready on port %d", self._port)
        if self._ready_file is not None:
            partial = self._ready_file.with_suffix(".partial")
            partial.write_text(json.dumps({"port": self._port, "pid": os.getpid()}))
            partial.rename(self._ready_file)


def main() -> int:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_starter()
    # Bound before the model is read, so that a port in use is known at once; it listens only when all is ready.
    # Its protocol is named, because asyncio switches Nagle's algorithm off only then: it costs 40 ms an answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((args.host, args.port))
    except OSError as error:
        log.error("cannot start on %s port %d: %s", args.host, args.port, error)
        return 1
    try:
        serve(args, listener)
    except (BadRequest, MissingTool) as error:
        log.error("cannot start: %s", error)
        return 1
    return 0


def serve(args: argparse.Namespace, listener: socket.socket) -> None:
    """Load the model and answer until SIGTERM. Raises BadRequest if the checkpoint or the options will
    not do, MissingTool where its kernel cannot be built."""
    read_checkpoint(Path(args.model_path))  # before torch is imported, which takes seconds
    import torch

    from nanodag.sampler.engine import Engine
    from nanodag.sampler.engine_loop import EngineLoop
    from nanodag.sampler.generation_server import SamplerServer

    torch.set_num_threads(args.threads)
    engine = Engine(
        args.model_path,
        dtype=args.dtype,
        device=args.device,
        max_batch=args.max_running_requests,
        context_length=args.context_length,
        cache_bytes=args.cache_bytes,
        deterministic=args.deterministic,
        seed=args.random_seed,
        weight_version=args.weight_version,
        stream_every_s=args.stream_every_s,
    )
    sizes = (engine.num_slots, engine.context_length)
    log.info("%s in %s: %d samples of %d tokens at once", args.model_path, engine.dtype_name, *sizes)
    loop = EngineLoop(engine, on_crash=_exit_on_crash)
    server = SamplerServer(engine, loop, max_text_bytes=args.max_text_bytes)
    config = uvicorn.Config(
        Doors(
            server.application(),
            names={args.host, socket.gethostname(), *args.allow_host},
            keys=[token] if (token := take_token()) else (),
            max_body_bytes=args.max_body_bytes,
        ),
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    loop.start()
    _Server(config, args.ready_file, listener.getsockname()[1]).run(sockets=[listener])
    loop.stop()


def _exit_on_crash(error: BaseException) -> None:
    """End the process at once: its clients learn of it by their broken connections."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
