"""`nanodag rollouts`: what RL sampled, as a page, in the terminal, or as a file. Light: it imports when it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanodag.cli.parameters import File, RunName, argument, option
from nanodag.errors import ArtifactNotFound, ConfigError, NanodagError
from nanodag.errors.words import counted

if TYPE_CHECKING:
    from nanodag.rl.rollouts.rollout_files import Shelf, Wanted

LEAST_GOOD = 1.0


def rollouts(
    context: typer.Context,
    run: RunName = "",
    stage: Annotated[str, argument("rollouts.stage")] = "",
    port: Annotated[int | None, option("page_port")] = None,
    step: Annotated[int | None, option("rollouts.step")] = None,
    role: Annotated[str, option("rollouts.role")] = "",
    failed: Annotated[bool, option("rollouts.failed", "--failed")] = False,
    samples: Annotated[int, option("rollouts.samples", "--print")] = 0,
    export: Annotated[str, option("rollouts.export")] = "",
    best: Annotated[int, option("rollouts.best")] = 0,
    pairs: Annotated[bool, option("rollouts.pairs", "--pairs")] = False,
    lowest: Annotated[float | None, option("rollouts.lowest")] = None,
    file: File = "",
) -> None:
    """Open a local page to read what RL sampled. Ctrl-C ends it. Or print it, or write it to a file.

    \b
    nanodag rollouts RUN --port 8080
    nanodag rollouts RUN --print 4 --failed
    nanodag rollouts RUN --export rollouts.parquet --step 20
    nanodag rollouts RUN --export best.jsonl --best 1 --lowest 0.5
    nanodag rollouts RUN --export pairs.jsonl --pairs
    """
    _refuse_void(context)
    from nanodag.cli.live_table import make_console
    from nanodag.cli.show import find_run, print_stale
    from nanodag.rl.rollouts.rollout_files import FAILED, Wanted, shelf_of
    from nanodag.run.record import served_store

    store = served_store(file)
    record = find_run(store, run)
    shelf = shelf_of(store, record, stage)
    print_stale(make_console(), record, shelf.stage)
    criteria = Wanted(role=role, fate=FAILED if failed else "")
    if export:
        least = LEAST_GOOD if lowest is None else lowest
        save_rollouts(shelf, Path(export), criteria, step=step, best=best, pairs=pairs, lowest=least)
    elif samples:
        print_rollouts(shelf, criteria, most=samples, step=step)
    else:
        from nanodag.viewer.app import make_app, serve

        query = {"step": "" if step is None else str(step), "role": role, "fate": criteria.fate}
        serve(make_app(shelf), port=port or 0, query={name: value for name, value in query.items() if value})


def print_rollouts(shelf: "Shelf", wanted: "Wanted", *, most: int, step: int | None) -> None:
    """Print samples of a step, the newest where step is None: the first `most` of those that are wanted."""
    from nanodag.cli.live_table import make_console
    from nanodag.tokenizer.encoding import Encoding
    from nanodag.viewer.sample_view import first_samples, text_of

    steps = shelf.steps_with_rollouts()
    if not steps:
        raise ArtifactNotFound(f"Stage {shelf.stage} of run {shelf.run} has no rollouts yet; ask again in a while.")
    console, shown = make_console(), steps[-1] if step is None else step
    reads = shelf.read(shown)
    chosen = first_samples([read for read in reads if wanted.is_met_by(read)], most)
    console.print(f"step {shown}: {len(chosen)} of {counted(len(reads), 'rollout')}", style="bold")
    console.print(text_of(Encoding(shelf.model), chosen), soft_wrap=True, end="")


def save_rollouts(
    shelf: "Shelf", path: Path, wanted: "Wanted", *, step: int | None, best: int, pairs: bool, lowest: float
) -> None:
    """Write what is wanted of the rollouts, or the conversations (`best`) or pairs made of them, and say how many.
    step: that one alone; None for all."""
    from nanodag.cli.live_table import make_console
    from nanodag.rl.rollouts.export import export_chats, export_pairs, export_rollouts

    console = make_console()
    try:
        if best:
            exported, what = export_chats(shelf, path, wanted, step=step, best=best, lowest=lowest), "conversation"
        elif pairs:
            exported, what = export_pairs(shelf, path, wanted, step=step, lowest=lowest), "pair"
        else:
            exported, what = export_rollouts(shelf, path, wanted, step=step), "rollout"
    except NanodagError:  # of what is read, such as a step that there is not
        raise
    except OSError as error:
        raise ConfigError(f"The export into {path} failed: {error}.") from error
    console.print(f"{counted(exported.rows, what)} in {path}", soft_wrap=True)
    for reason, count in exported.left_out.items():
        console.print(f"  left out: {count:,} {reason}")


def _refuse_void(context: typer.Context) -> None:
    """Raise ConfigError where an option would do nothing."""
    from nanodag.host.beside import table_beside

    values, rules = context.params, table_beside(__file__)
    given = {param.opts[0] for param in context.command.params if values.get(param.name or "") != param.default}
    for flag, other, why in rules["clashes"]:
        if {flag, other} <= given:
            raise ConfigError(f"{flag} does not go with {other}: {why}. Leave one of them out.")
    for flag, needed in rules["needs"]:
        if flag in given and given.isdisjoint(needed):
            raise ConfigError(f"{flag} does nothing without {' or '.join(needed)}; add that, or leave {flag} out.")
