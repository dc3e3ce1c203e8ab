"""More positions for a model that goes on: its folder again, with another config.json."""

import os
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Literal

from nanodag.errors import ConfigError
from nanodag.model.architecture import read_checkpoint, read_json, write_json
from nanodag.store.atomic import temporary_name


def extended(source: Path, folder: Path, *, positions: int, by: Literal["yarn", "ntk"]) -> Path:
    """A folder, named after `folder` and source, with links to a model's files and a config.json of so many positions.

    by: `yarn` stretches the slow angles (arXiv:2309.00071, section 3), `ntk` raises the base of all, so that the
    slowest one turns as far over the new positions as over the old ones (section 3.1). Ranks may make it at once.
    Raises ConfigError for positions that are no more than the model's, and for angles that are stretched already.
    """
    config, of = read_json(source / "config.json"), read_checkpoint(source).architecture
    before, partial = of.max_positions, config.get("partial_rotary_factor", 1.0)
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {})}
    kind, theta = rope.get("rope_type", rope.get("type", "default")), rope.get("rope_theta", config.get("rope_theta"))
    theta = of.rope.theta if theta is None and of.model_code == "own" else theta
    if positions <= before:
        raise ConfigError(f"shape.extend_to: {positions} is no more than the {before} positions of {source}.")
    if kind != "default" or theta is None:
        what = f"angles of kind {kind!r}" if theta else "no angles of one base, or does not say it"
        raise ConfigError(f"shape.extend_to: {source} has {what}; plain angles of one base are what is extended.")
    factor, width = positions / before, int(of.head_dim * rope.get("partial_rotary_factor", partial))
    if by == "ntk":
        if width < 4:
            raise ConfigError(f"shape.extend_by: ntk needs 4 numbers of a head that turn; {source} has {width}.")
        theta *= factor ** (width / (width - 2))
        rope = {**rope, "rope_theta": theta}
    else:
        stretched = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": before}
        rope = {**rope, "rope_theta": theta, **stretched}
    config |= {"max_position_embeddings": positions, "rope_parameters": rope}
    config |= {"rope_theta": theta} if "rope_theta" in config else {}
    for name in ("rope_scaling", "original_max_position_embeddings"):
        config.pop(name, None)
    folder = folder.with_name(f"{folder.name}-{sha256(str(source.absolute()).encode()).hexdigest()[:8]}")  # it may move
    temporary = folder.with_name(f"{folder.name}.{temporary_name()}")
    temporary.mkdir(parents=True)
    for path in {*source.iterdir()} - {source / "config.json"}:
        (temporary / path.name).symlink_to(path.absolute())
    write_json(temporary / "config.json", config)
    try:
        os.rename(temporary, folder)
    except OSError:  # another rank made it, or an earlier try
        shutil.rmtree(temporary)
        if not folder.is_dir():
            raise
    return folder
