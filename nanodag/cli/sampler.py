"""`nanodag sampler`: the environment of SGLang, which is another one than the trainer's, and servers run by hand."""

from typing import Annotated, Literal

import typer

sampler_app = typer.Typer(help="SGLang's environment, and samplers that you run yourself.", no_args_is_help=True)


@sampler_app.command()
def install(
    cpu: Annotated[
        bool | None, typer.Option("--cpu/--cuda", help="For a CPU (3.2 GB) or CUDA (some 11 GB). Default: by hardware.")
    ] = None,
    folder: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Where it lies. Default: ~/.cache/nanodag/sglang-cpu or -cuda."),
    ] = "",
    if_supported: Annotated[
        bool, typer.Option("--if-supported", help="For CUDA, and only where SGLang runs on this machine's GPUs.")
    ] = False,
) -> None:
    """Make SGLang's environment.

    It takes 2 to 20 minutes, by network and disk. Interrupted, it goes on when called again. What pip says lies in
    install.log in the environment's folder.

    \b
    nanodag sampler install --cpu
    """
    import os
    from pathlib import Path

    from nanodag.cli.live_table import Shown
    from nanodag.host.machine import usable_gpus
    from nanodag.inference.sglang_install import PYTHON_VARIABLE, glibc_version, sglang_environment, why_not_on
    from nanodag.inference.sglang_install import install as install_sglang

    gpus = usable_gpus()
    device: Literal["cpu", "cuda"] = "cpu" if cpu or (cpu is None and not gpus) else "cuda"
    why_not = why_not_on(gpus, glibc_version()) if if_supported or device == "cuda" else ""
    if if_supported and (why_not or PYTHON_VARIABLE in os.environ):
        if gpus:
            typer.echo(f"SGLang is left out: {why_not or f'{PYTHON_VARIABLE} names one'}", err=True)
        return
    if why_not:
        typer.echo(f"It will not run here: {why_not}", err=True)
    with Shown() as shown:
        where = Path(folder).absolute() if folder else sglang_environment(device).folder
        python = install_sglang(device, where, shown.say, show=shown)
    if folder:
        typer.echo(f"Name it to those who use it: sampler.python, or {PYTHON_VARIABLE}={python}")


@sampler_app.command()
def serve(
    model: Annotated[str, typer.Option(metavar="MODEL", help="A folder, a model of the hub, or RUN:STAGE.")],
    engine: Annotated[str, typer.Option(help="embedded, sglang, or auto as the stage would choose here.")] = "auto",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Any but loopback needs --api-key-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=1, max=65535, help="Of the server.")] = 30000,
    api_key_file: Annotated[
        str, typer.Option(metavar="FILE", help="Its first line is the key that requests must bear.")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16; auto as the stage's sampler.precision here.")
    ] = "auto",
    context_length: Annotated[int, typer.Option(metavar="N", min=0, help="Prompt and response; 0 for what fits.")] = 0,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic/--not-deterministic", help="Default: embedded on a CPU is.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One more name of this machine (embedded). Repeatable."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Of the engine's own options. Repeatable."),
    ] = None,
    file: Annotated[str, typer.Option(metavar="FILE", help="Whose store RUN:STAGE is in.")] = "",
) -> None:
    """Serve one sampler, for stages that name it in sampler.urls. Ctrl-C ends it.

    Its weights are replaced by those of the stage, so any model of the same shape will do. One stage at a time may use
    it.

    \b
    nanodag sampler serve --model RUN:sft --host 0.0.0.0 --api-key-file ~/key
    nanodag sampler serve --model Qwen/Qwen3-0.6B --engine sglang
    """
    import os

    from nanodag.cli.sampler_serve import served_by
    from nanodag.engines.start import foreground_command

    served = served_by(
        model,
        engine=engine,
        host=host,
        port=port,
        key_file=api_key_file,
        dtype=dtype,
        context=context_length,
        deterministic=deterministic,
        names=allow_host or [],
        options=option or [],
        file=file,
    )
    command, environment = foreground_command(served)
    name = served.host if served.host not in ("0.0.0.0", "::") else os.uname().nodename
    typer.echo(f"A stage names it in sampler.urls as http://{name}:{port}{' FILE-OF-ITS-KEY' if api_key_file else ''}")
    os.execve(command[0], command, environment)  # in this process's place: a signal then reaches the server
