"""`nanodag sampler`: the environment of SGLang, which is another one than the trainer's."""

from typing import Annotated, Literal

import typer

sampler_app = typer.Typer(help="The environment of SGLang, for rl.sampler.engine=sglang.", no_args_is_help=True)

Cpu = Annotated[
    bool | None, typer.Option("--cpu/--cuda", help="For a CPU (3.2 GB) or CUDA (some 11 GB). Default: by hardware.")
]


@sampler_app.command()
def install(
    cpu: Cpu = None,
    folder: Annotated[
        str,
        typer.Option(
            "--folder", metavar="FOLDER", help="Where it lies. Default: ~/.cache/nanodag/sglang-cpu or -cuda."
        ),
    ] = "",
) -> None:
    """Make SGLang's environment.

    It takes 2 to 20 minutes, by network and disk. Interrupted, it goes on when called again. What pip says lies in
    install.log in the environment's folder.

    \b
    nanodag sampler install --cpu
    """
    import shutil
    from pathlib import Path

    from nanodag.cli.shown import Shown
    from nanodag.inference.sglang_install import PYTHON_VARIABLE, default_folder
    from nanodag.inference.sglang_install import install as install_sglang

    has_gpu = shutil.which("nvidia-smi") is not None
    device: Literal["cpu", "cuda"] = "cpu" if cpu or (cpu is None and not has_gpu) else "cuda"
    with Shown() as shown:
        where = Path(folder).absolute() if folder else default_folder(device)
        python = install_sglang(device, where, shown.say, show=shown)
    if folder:
        typer.echo(f"Name it to those who use it: sampler.python, or {PYTHON_VARIABLE}={python}")
