"""``python -m nanodag.sampler '{"model": "DIR", "port": 30000, ...}'``: serve a checkpoint over HTTP until SIGTERM.

Its one argument is its description (`nanodag.inference.engine_settings`). With port 0 the system chooses one.
"""

import logging
import socket
import sys

import uvicorn

from nanodag.errors import BadRequest, ConfigError, MissingTool
from nanodag.inference.access_checks import Doors, bound_socket
from nanodag.inference.engine_settings import EngineSettings
from nanodag.inference.server_variables import end_with_starter, take_token
from nanodag.model.architecture import read_checkpoint

log = logging.getLogger("nanodag.sampler")

KEEP_ALIVE_S = 3600


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        (described,) = sys.argv[1:]
        settings = EngineSettings.model_validate_json(described)
    except ValueError as error:
        log.error("cannot start: %s", error)
        return 2
    end_with_starter()
    try:
        # Bound before the model is read, so that a port in use is known at once.
        serve(settings, bound_socket(settings.host, settings.port, socket.AF_INET))
    except (BadRequest, ConfigError, MissingTool) as error:
        log.error("cannot start: %s", error)
        return 1
    return 0


def serve(settings: EngineSettings, listener: socket.socket) -> None:
    """Load the model and answer until SIGTERM. Raises BadRequest if the checkpoint or the options will
    not do, MissingTool where its kernel cannot be built."""
    read_checkpoint(settings.base or settings.model)  # before torch is imported, which takes seconds
    import torch

    from nanodag.sampler.engine import Engine
    from nanodag.sampler.engine_loop import EngineLoop
    from nanodag.sampler.generation_server import SamplerServer

    torch.set_num_threads(settings.threads)
    engine = Engine(settings)
    sizes = (engine.num_slots, engine.context_length)
    log.info("%s in %s: %d samples of %d tokens at once", settings.model, engine.dtype_name, *sizes)
    loop = EngineLoop(engine)
    server = SamplerServer(engine, loop, max_text_bytes=settings.max_text_bytes)
    config = uvicorn.Config(
        Doors(
            server.application(),
            names={settings.host, socket.gethostname(), *settings.allow_host},
            keys=[token] if (token := take_token()) else (),
            max_body_bytes=settings.max_body_bytes,
        ),
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    loop.start()
    listener.listen()  # who comes as soon as it is said waits for the server
    port = listener.getsockname()[1]
    log.info("ready on port %d", port)
    settings.tell_port(port)
    uvicorn.Server(config).run(sockets=[listener])
    loop.stop()


if __name__ == "__main__":
    sys.exit(main())
