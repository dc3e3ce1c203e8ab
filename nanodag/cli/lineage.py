"""`nanodag lineage`, `diff`, `export` and `reproduce`: where an artifact is from, and whether it would be the same."""

import os
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from nanodag.cli.live_table import fitting, make_console
from nanodag.cli.show import find_run, print_stale
from nanodag.config.kinds import recorded_kind
from nanodag.errors import CorruptArtifact, StoreError
from nanodag.errors.words import counted, duration, size
from nanodag.report.lineage import Origin, origin_of, picture_of
from nanodag.report.model_card import card_of
from nanodag.run.diff import SECTIONS, DiffLine, compare
from nanodag.run.record import served_store
from nanodag.store import Artifact, Store
from nanodag.store.atomic import copy_hashed, fsync_folders, hashes_below, temporary_name, write_bytes, writing
from nanodag.store.manifest import BASE

WIDEST = 60
IS_MODEL = {"config.json", "tokenizer.json"}


def show_lineage(key: str, *, picture: str, file: str) -> None:
    """Print the lineage as a tree; with `picture`, write it as an SVG too."""
    console, store = make_console(), served_store(file)
    origin, artifacts = origin_of(store, store.get(key))
    printed: set[int] = set()
    tree = Tree(_title("", origin), guide_style="dim")
    _grow(tree, origin, printed)
    console.print(tree, soft_wrap=True)
    if picture:
        path = Path(picture).absolute()
        if path.suffix != ".svg":
            raise StoreError(f"A lineage is drawn as SVG; {path.name} ends in {path.suffix!r}. Name it NAME.svg.")
        write_bytes(path, picture_of(artifacts).encode())
        console.print(str(path), soft_wrap=True)


def _title(label: str, origin: Origin) -> Text:
    artifact, head = origin.artifact, f"{label}: " if label else ""
    if artifact is None:
        return Text.assemble((head, "dim"), (origin.what, "red"))
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(artifact.created))
    took = duration(float(artifact.cost.get("seconds", -1.0)))
    facts = [f"{artifact.key[:12]}/{artifact.attempt}", f"content {artifact.digest[:12]}", size(artifact.num_bytes)]
    facts += [when, *([f"took {took}"] if took else []), f"code {artifact.environment.get('revision', '?')}"]
    kind = recorded_kind(artifact.kind).name
    return Text.assemble((head, "dim"), (artifact.stage, "bold"), f" ({kind})  ", ("  ".join(facts), "dim"))


def _grow(tree: Tree, origin: Origin, said: set[int]) -> None:
    said.add(id(origin))
    for label, source in origin.inputs.items():
        is_known = id(source) in said and source.inputs
        branch = tree.add(_title(label, source) + Text("  (as above)" if is_known else "", "dim"))
        if not is_known:
            _grow(branch, source, said)
    for url in (origin.artifact.sources or {}) if origin.artifact is not None else ():
        tree.add(Text(f"data {url}", "cyan"))


def show_diff(first: str, second: str, *, show_all: bool, file: str) -> None:
    """Two runs side by side: the lines that are not the same."""
    console, store = make_console(), served_store(file)
    before, after = find_run(store, first), find_run(store, second)
    rows = compare(store, before, after)
    for section in SECTIONS:
        of_section = [row for row in rows if row.section == section]
        shown = [row for row in of_section if show_all or not row.is_same]
        same = sum(row.is_same for row in of_section)
        console.print(Text.assemble((section, "bold"), (f"  {same} of {len(of_section)} the same", "dim")))
        if shown:
            numbers = ["difference"] if section in ("metrics", "cost") else []
            table = [_cells(row, [before.run, after.run], numbers) for row in shown]
            console.print(fitting(console, table, numbers=[before.run, after.run, *numbers] if numbers else ()))


def _cells(row: DiffLine, runs: Sequence[str], numbers: Sequence[str]) -> dict[str, RenderableType]:
    """A line of the comparison by its columns' titles. numbers: those of a difference."""
    sides = (Text(_shown(row.before), "red"), Text(_shown(row.after), "green"))
    difference = "" if row.difference is None else f"{row.difference:+.5g}"
    return {"": Text(row.name), **dict(zip(runs, sides, strict=True)), **dict.fromkeys(numbers, difference)}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def export_artifact(key: str, folder: str, *, file: str) -> None:
    """Copy a model, or a tokenizer, into a new folder, verified; it is whole when it has that name.

    Raises StoreError when something has that name already, or the artifact is no Hugging Face folder, CorruptArtifact
    when its bytes are not what they were.
    """
    console, store = make_console(), served_store(file)
    artifact = store.get(key)
    path = _export(store, artifact, Path(folder).expanduser().absolute())
    kind = recorded_kind(artifact.kind).name
    console.print(f"{artifact.stage} ({kind}), {size(artifact.num_bytes)}: {path}", soft_wrap=True)
    run, colon, stage = key.partition(":")
    if colon:
        print_stale(console, store.read_run(run), stage)


def push_artifact(key: str, name: str, *, private: bool, card: bool, file: str) -> None:
    """Publish a model with its card on the Hugging Face hub; with `card` print the card and send nothing.

    Raises StoreError where the hub does not take it, and as `export_artifact` does.
    """
    console, store = make_console(), served_store(file)
    artifact, (run, colon, stage) = store.get(key), key.partition(":")
    record = store.read_run(run) if colon else None
    text = card_of(store, artifact, name, record)
    if card:
        print(text)
        return
    if record is not None:
        print_stale(console, record, stage)
    import httpx2  # what huggingface_hub speaks HTTP with: a missing network is its error, not an OSError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with TemporaryDirectory() as temporary:
        folder = _export(store, artifact, Path(temporary) / "model")
        (folder / "README.md").write_text(text, encoding="utf-8")
        try:
            HfApi().create_repo(name, private=private, exist_ok=True)
            sent = HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=f"{stage or key} by nanodag")
        except (HfHubHTTPError, HFValidationError, httpx2.HTTPError, OSError) as error:
            raise StoreError(
                f"{name} was not published: {error}. The name is owner/name; sign in by `hf auth login`."
            ) from error
    console.print(f"{artifact.stage}, {size(artifact.num_bytes)}: {sent}", soft_wrap=True)


def reproduce_artifact(key: str, *, file: str) -> int:
    """Run an artifact's stage again and compare; returns the exit code: 0 for the same bytes."""
    from nanodag.run.reproduce import reproduce

    console, store = make_console(), served_store(file)
    artifact = store.get(key)
    kind = recorded_kind(artifact.kind).name
    console.print(f"Building {artifact.stage} ({kind}) of {artifact.key[:12]}/{artifact.attempt} again.")
    say = partial(console.print, style="dim", markup=False, soft_wrap=True)
    result = reproduce(store, artifact, file=file, on_line=say)
    for name, (then, now) in result.environment.items():
        console.print(f"{name} was {_shown(then)}, is {_shown(now)}", style="yellow", markup=False, soft_wrap=True)
    for name in [n for n, state in result.files.items() if state != "same"]:
        console.print(f"{result.files[name]:<8} {name}", style="red", markup=False, soft_wrap=True)
    if result.is_same:
        console.print(
            f"The same bytes in {counted(len(result.files), 'file')}: content {result.digest[:16]}.", style="green"
        )
        return 0
    for name in sorted({*artifact.metrics, *result.metrics}):
        then, now = artifact.metrics.get(name), result.metrics.get(name)
        if then != now:
            console.print(f"{name} was {_shown(then)}, is {_shown(now)}", markup=False, soft_wrap=True)
    console.print(f"Not the same: content was {artifact.digest[:16]}, is {result.digest[:16]}.", style="red")
    console.print(f"What came out this time lies in {os.path.join(str(result.workspace), 'output')}", soft_wrap=True)
    return 1


def _export(store: Store, artifact: Artifact, folder: Path) -> Path:
    if not IS_MODEL & set(artifact.files):
        raise StoreError(
            f"Artifact {artifact.folder} is of kind {artifact.kind}, no model and no tokenizer; its files lie in "
            f"{store.materialize(artifact)}."
        )
    if os.path.lexists(folder):
        raise StoreError(f"{folder} is there already, and nothing is overwritten. Name a folder that is not there yet.")
    source = store.materialize(artifact)
    temporary = folder.with_name(temporary_name())
    with writing(f"Exporting into {folder}"):
        try:
            for name, facts in (hashes_below(source) if BASE in artifact.files else artifact.files).items():
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
