"""`nanodag env`: environments of other packages, which live in a Python environment of their own."""

from typing import Annotated, Literal

import typer

env_app = typer.Typer(help="Packages of environments, in Pythons of their own.", no_args_is_help=True)


@env_app.command()
def install(
    package: Annotated[Literal["verifiers"], typer.Argument(metavar="PACKAGE", help="verifiers.")],
    folder: Annotated[
        str, typer.Option("--folder", metavar="FOLDER", help="Where it lies. Default: ~/.cache/nanodag/verifiers.")
    ] = "",
) -> None:
    """Make the Python environment of a package of environments.

    It takes a minute or two and 570 MB. Interrupted, it goes on when called again. What pip says lies in install.log in
    its folder.

    \b
    nanodag env install verifiers
    """
    from pathlib import Path

    from nanodag.cli.progress_line import Shown
    from nanodag.external_envs.verifiers_install import VERIFIERS
    from nanodag.external_envs.verifiers_install import install as install_verifiers

    with Shown() as shown:
        where = Path(folder).absolute() if folder else VERIFIERS.folder
        python = install_verifiers(where, shown.say, show=shown)
    if folder:
        typer.echo(f"Name it to those who use it: {VERIFIERS.variable}={python}")
