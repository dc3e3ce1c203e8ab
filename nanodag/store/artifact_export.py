"""An artifact's files as a plain folder outside of the store."""

import os
import secrets
import shutil
from pathlib import Path

from nanodag.errors import CorruptArtifact, StoreError
from nanodag.store.artifacts import Store
from nanodag.store.atomic import copy_hashed, fsync_folders, writing
from nanodag.store.manifest import Artifact

IS_MODEL = {"config.json", "tokenizer.json"}


def export(store: Store, artifact: Artifact, folder: Path) -> Path:
    """Copy a model, or a tokenizer, into a new folder, verified; it is whole when it has that name.

    Raises StoreError when something has that name already, or the artifact is no Hugging Face folder, CorruptArtifact
    when its bytes are not what they were.
    """
    if not IS_MODEL & set(artifact.files):
        raise StoreError(
            f"Artifact {artifact.folder} is of kind {artifact.kind}, no model and no tokenizer; its files lie in "
            f"{store.materialize(artifact)}."
        )
    folder = folder.expanduser().absolute()
    if os.path.lexists(folder):
        raise StoreError(f"{folder} is there already, and nothing is overwritten. Name a folder that is not there yet.")
    source = store.materialize(artifact)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with writing(f"Exporting into {folder}"):
        try:
            for name, facts in artifact.files.items():
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if copy_hashed(source / name, target) != facts["sha256"]:
                    raise CorruptArtifact(f"{source / name} changed while it was copied. Try again.")
            fsync_folders(temporary)
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder
