"""The kinds of stages, and how a kind is found by what a pipeline says as `kind`.

Shipped ones stand in `kinds.yaml`, their configs in the modules here. An installed package offers its own under a name,
as an entry point of the group `nanodag.kinds`: who installs a package lets it run. Any other is named as `module:NAME`,
as rewards and adapters are, and stands beside the pipeline file or in its trusted_modules.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from nanodag.config.kind import Kind
from nanodag.config.stage_base import StageBase
from nanodag.errors import ConfigError
from nanodag.errors.words import listed, nearest
from nanodag.host.beside import table_beside
from nanodag.own_code.find import forget_others, search_last
from nanodag.own_code.functions import function_at
from nanodag.own_code.trusted_modules import Voucher, check_owner
from nanodag.own_code.user_frame import with_place

ENTRY_POINTS = "nanodag.kinds"

_loaded: dict[str, Kind] = {}  # of users' own
_voucher: Voucher | None = None


def find_kind(name: str) -> Kind:
    """The kind that a pipeline names.

    Raises ConfigError when there is none, or the pipeline file does not vouch for the module that it stands in.
    """
    if kind := shipped().get(name) or _loaded.get(name):
        return kind
    if name in installed():
        _loaded[name] = _checked(name, installed()[name])
    elif ":" in name:
        _loaded[name] = _own(name)
    else:
        names = [*shipped(), *installed()]
        more = nearest(name, names, likeness=0.75)
        raise ConfigError(f"there is no kind {name!r:.80}; kinds are {listed(names)}.{more}")
    return _loaded[name]


def recorded_kind(name: str) -> Kind:
    """The kind that a record or an artifact names; one that is not to be had here any more makes nothing."""
    try:
        return find_kind(name)
    except (ConfigError, UnicodeError):
        return Kind(name=name, config=StageBase, module="", order=100)


@cache
def shipped() -> dict[str, Kind]:
    """The kinds that come with nanodag, by name."""
    return {name: _shipped(name, **row) for name, row in table_beside(__file__, "kinds.yaml").items()}


def _shipped(name: str, *, config: str, **fields: Any) -> Kind:
    from nanodag.config.supervised import SupervisedKind, SupervisedStage

    stage = pkgutil.resolve_name(f"{__name__}.{config}")
    return (SupervisedKind if issubclass(stage, SupervisedStage) else Kind)(name=name, config=stage, **fields)


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Kinds of installed packages, by name. None is imported before it is named."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def known() -> dict[str, Kind]:
    """The kinds that are loaded already, without looking for more."""
    return {**shipped(), **_loaded}


def vouch_for(file: Path, modules: Sequence[str]) -> None:
    """Allow own kinds that stand beside this pipeline file, or in these modules, and no others from now on."""
    global _voucher
    forget_others(file.parent)
    voucher = Voucher(file=file, trusted_modules=tuple(modules))
    if voucher != _voucher:
        _voucher = voucher
        for name in [name for name in _loaded if ":" in name]:
            del _loaded[name]


def _own(name: str) -> Kind:
    if _voucher is None:
        raise ConfigError(f"kind {name!r} is a user's own, and no pipeline file has vouched for it in this process")
    if _voucher.file.exists():  # a worker is told of its folder only, by who has looked
        check_owner(_voucher.file)
    _voucher.check("kind", name)
    search_last(_voucher.file.parent)  # as in a worker
    return _checked(name, name)


def _checked(name: str, place: EntryPoint | str) -> Kind:
    try:
        kind = function_at(place) if isinstance(place, str) else place.load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise whatever it likes
        raise ConfigError(f"the kind {name!r} cannot be imported: {with_place(error)}") from error
    if not isinstance(kind, Kind):
        raise ConfigError(f"the kind {name!r} must be a nanodag.config.kind.Kind; found {kind!r:.100}")
    if not isinstance(kind.config, type) or not issubclass(kind.config, StageBase):
        raise ConfigError(f"the kind {name!r} must have a config class below StageBase; found {kind.config!r:.100}")
    if not isinstance(kind.needs, Mapping) or not isinstance(kind.may_take, Mapping):
        raise ConfigError(f"the kind {name!r} must have tables as needs and may_take: input name -> what it must be")
    return kind
