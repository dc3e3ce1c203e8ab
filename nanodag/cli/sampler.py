"""`nanodag sampler`: the environment of SGLang, which is another one than the trainer's."""

from typing import Annotated, Literal

import typer

sampler_app = typer.Typer(help="SGLang as a sampler: the environment that it lives in.", no_args_is_help=True)

Cpu = Annotated[
    bool | None, typer.Option("--cpu/--cuda", help="For a CPU (2.6 GB) or for CUDA (11 GB); else by hardware.")
]


@sampler_app.command()
def install(
    cpu: Cpu = None,
    folder: Annotated[str, typer.Option("--folder", help="Where; else in the user's cache.")] = "",
) -> None:
    """Make SGLang's environment, for `sampler.engine: sglang`. Interrupted, it goes on when called again."""
    import shutil
    from pathlib import Path

    from nanodag.sampler.sglang_install import PYTHON_VARIABLE, default_folder
    from nanodag.sampler.sglang_install import install as install_sglang

    has_gpu = shutil.which("nvidia-smi") is not None
    device: Literal["cpu", "cuda"] = "cpu" if cpu or (cpu is None and not has_gpu) else "cuda"
    python = install_sglang(device, Path(folder).absolute() if folder else default_folder(device), typer.echo)
    if folder:
        typer.echo(f"Name it to those who use it: sampler.python, or {PYTHON_VARIABLE}={python}")
