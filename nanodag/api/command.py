"""The serving process: engines, the application over them, and its end.

`python -m nanodag.chat.web --model NAME=FOLDER ...`; `nanodag serve` calls it with folders of the store.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.routing import BaseRoute

from nanodag.api import metrics as api_metrics
from nanodag.api.application import application, quiet_server
from nanodag.api.follow import Followed, follow
from nanodag.api.launching import served_model, with_adapters, with_its_context
from nanodag.api.metrics import Metrics
from nanodag.api.served_model import Limits, ServedModel
from nanodag.api.sglang_routes import passed_on
from nanodag.engines.fleet import Fleet
from nanodag.errors import ConfigError, NanodagError
from nanodag.errors.words import counted
from nanodag.host.beside import table_beside
from nanodag.host.folders import Scratch
from nanodag.host.threads import cancelled
from nanodag.inference.access_checks import bound_socket
from nanodag.inference.addresses import keys_for
from nanodag.model.headers import ADAPTER_CONFIG, weights_digest
from nanodag.store import Store

STOP_S = 5  # what answers under way may still take when the server is ended

TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "path": Path}
LIMITS = ("max_body_bytes", "max_prompt_tokens", "max_new_tokens", "max_waiting", "request_timeout_s")  # of Limits

Routes = Callable[[], Sequence[BaseRoute]]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanodag.chat.web", description="Serve checkpoints by OpenAI's protocol."
    )
    for name, how in table_beside(__file__, "options.yaml").items():
        parser.add_argument(name, **how | ({"type": TYPES[how["type"]]} if "type" in how else {}))
    parser.set_defaults(**{name: getattr(Limits, name) for name in LIMITS})
    return parser.parse_args(arguments)


def serve(args: argparse.Namespace, extra_routes: Routes = tuple, ready: Callable[[str], None] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. extra_routes: makes what is served beside the API. ready: called
    with the server's address once models are up."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    api_metrics.log.setLevel(logging.WARNING if args.no_access_log else logging.INFO)
    try:
        asyncio.run(_serve(args, extra_routes, ready))
    except NanodagError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


async def _serve(args: argparse.Namespace, extra_routes: Routes, ready: Callable[[str], None] | None) -> None:
    keys, folders = keys_for(args.host, args.api_key_file), _folders(args.model, "--model", "config.json")
    listener = bound_socket(args.host, args.port)  # before anything that takes long
    own = Scratch("serve")
    scratch = own.path
    followed, weights = None, None
    engines: list[Fleet] = []
    following: list[asyncio.Task[None]] = []
    try:
        if args.follow:
            if args.follow in folders:
                raise ConfigError(f"--follow {args.follow} and --model have the same name.")
            followed = Followed(Store(args.store, local=args.store_local), args.follow, args.follow_stage, scratch)
            weights = followed.first()
            folders = {args.follow: weights.fetch(), **folders}
        if not folders:
            raise ConfigError("Nothing to serve: give --model NAME=FOLDER, or --follow RUN.")
        models = _models(args, folders, "" if weights is None else weights.version, scratch)
        engines = list(dict.fromkeys(model.backend for model in models.values() if isinstance(model.backend, Fleet)))
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.add_signal_handler(signal.SIGTERM, task.cancel)  # as Ctrl-C does; later uvicorn listens
        try:
            await asyncio.gather(*(each.start(args.replicas) for each in engines))
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
        models = {name: await with_its_context(model) for name, model in models.items()}
        limits = Limits(**{name: getattr(args, name) for name in LIMITS})
        metrics = Metrics(models)
        app = application(
            models,
            limits=limits,
            keys=keys,
            names={args.host, *args.allow_host},
            origins=args.cors,
            engine_routes=passed_on(models, limits),
            metrics=metrics,
            extra_routes=extra_routes(),
        )
        server = quiet_server(app, _Server, timeout_graceful_shutdown=STOP_S)
        following.append(asyncio.ensure_future(api_metrics.log_speed(metrics)))
        for each in engines:
            each.is_stopping = lambda: server.should_exit
        if followed is not None and weights is not None:
            following.append(asyncio.ensure_future(follow(followed, engines[0], weights.version)))
        listener.listen()  # who comes as soon as it is said waits for the server
        print(_said(args, models, len(engines), listener), flush=True)
        if ready is not None:
            ready(_address(listener))
        await server.serve(sockets=[listener])
    finally:
        await cancelled(*following)
        await asyncio.gather(*(each.end() for each in engines))
        listener.close()
        own.cleanup()


class _Server(uvicorn.Server):
    """uvicorn, which would end the process by the signal that ended it: engines are ended after it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, self.handle_exit, signum, None)
        yield


def _models(args: argparse.Namespace, folders: Mapping[str, Path], followed: str, logs: Path) -> dict[str, ServedModel]:
    """Models by their names; those of one folder share its engines. followed: the first weights' version of a run under
    way. Raises ConfigError for adapters that cannot be over any."""
    adapters = {n: (weights_digest(f), f) for n, f in _folders(args.adapter, "--adapter", ADAPTER_CONFIG).items()}
    bases = {name: name if name in folders else next(iter(folders)) for name in [*folders, *adapters]}
    engines = {name: (folders[base], base == args.follow) for name, base in bases.items()}
    models: dict[str, ServedModel] = {}
    first: dict[tuple[Path, bool], ServedModel] = {}
    for name, served in zip(bases, _served_names(bases, args.served_model_name), strict=True):
        folder, is_followed = engine = engines[name]
        own = dict(adapters[other] for other in adapters if engines[other] == engine)
        if own and is_followed:
            raise ConfigError(f"--adapter over {name}, which --follow changes: give it the name of a --model.")
        if engine not in first:
            version = followed if is_followed else weights_digest(folder)
            places = {"first": len(first) * args.replicas, "num_models": len({*engines.values()})}
            first[engine] = served_model(args, served, folder, version, logs, adapters=own, **places)
        own_engines = replace(first[engine], name=served)
        models[served] = with_adapters(own_engines, *adapters[name]) if name in adapters else own_engines
    return models


def _folders(given: Sequence[str], option: str, file: str) -> dict[str, Path]:
    """Folders by name. Raises ConfigError for one without the file that all of its kind have, or two of a name."""
    folders: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        folder = Path(path).expanduser().absolute()
        if not equals or not name or name in folders:
            raise ConfigError(f"{option} {text!r} is not NAME=FOLDER, or a second {name!r}.")
        if not (folder / file).is_file():
            raise ConfigError(f"{option} {text!r}: {folder} is no {option[2:]} folder; it has no {file}.")
        folders[name] = folder
    return folders


def _served_names(names: Iterable[str], first: str) -> list[str]:
    """The models' names, the first one's in place of its own where it is given. Raises ConfigError for one twice."""
    own, *others = names
    if first in others:
        raise ConfigError(f"--served-model-name {first!r} is another model's name.")
    return [first or own, *others]


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _said(args: argparse.Namespace, models: dict[str, ServedModel], num_fleets: int, listener: socket.socket) -> str:
    """One line: what is served where, by what, and how to stop it."""
    names = ", ".join(f"{name} (context {model.context_length})" for name, model in models.items())
    engines = counted(args.replicas * num_fleets, f"{args.engine} engine")
    return f"Serving {names} by {engines} at {_address(listener)}/v1; Ctrl-C ends it."
