"""`nanodag slurm`: one job of Slurm in which a whole pipeline runs; `sbatch`: the options of one stage. Light: each
imports what it needs when it runs.

The run and Prefect's server are on the job's first node; stages reach the others by srun. Near the time limit the run
is stopped, which leaves checkpoints, and the job queues itself again: it resumes the run of its name. `JOB` is its
script, behind Slurm's options.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanodag.cli.parameters import File, NewRun, On, Overrides, Preset, argument, command, option
from nanodag.errors import ConfigError, MissingTool
from nanodag.errors.words import listed, nearest

if TYPE_CHECKING:
    from nanodag.config import Resolved

# A run takes 90 s at most to stop, its server 30 s more. Slurm may send the signal a minute too early, never too late.
SIGNAL = "B:USR1@180"
HOSTFILE = "NANODAG_HOSTFILE"
JOB = Path(__file__).with_name("job.sh.jinja")


def job_script(options: Sequence[str], run: Sequence[str], end: Sequence[str]) -> str:
    """The text of a job. options: of sbatch, later ones before earlier ones. run, end: the commands that run the
    pipeline and that end its server."""
    import jinja2

    template = jinja2.Template(JOB.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
    return template.render(options=map(shlex.quote, options), run=shlex.join(run), end=shlex.join(end))


def slurm(
    on: Annotated[str, option("slurm.on", "--on")],
    overrides: Overrides = None,
    preset: Preset = "auto",
    file: File = "",
    name: NewRun = "",
    time_limit: Annotated[str, option("slurm.time_limit", "--time")] = "24:00:00",
    partition: Annotated[str, option("slurm.partition")] = "",
    account: Annotated[str, option("slurm.account")] = "",
    sbatch: Annotated[list[str] | None, option("slurm.sbatch")] = None,
    is_printed: Annotated[bool, option("slurm.is_printed", "--print")] = False,
) -> None:
    """Run a pipeline as one job of a Slurm cluster.

    --on says what it asks for: nodes, and the GPUs, cores and memory of each. At its time limit the job queues again
    and goes on from checkpoints; it ends with the run. Of several nodes RL's samplers have half, unless the pipeline
    says otherwise. What does not fit is refused before anything is sent.

    \b
    nanodag slurm --on 2x8xH100 --preset speedrun --partition gpu
    nanodag slurm --on 8xH100 --name d24 --sbatch qos=high --print
    """
    if not is_printed and shutil.which("sbatch") is None:
        raise MissingTool("There is no sbatch here. Call this on a login node of a Slurm cluster, or add --print.")
    name, options, arguments = _checked(on, overrides or [], preset=preset, file=file, name=name)
    named = {"time": time_limit, "partition": partition, "account": account}
    options += [f"--{option}={value}" for option, value in named.items() if value]
    options += [f"--{option}" for option in sbatch or []]
    nanodag = str(Path(sys.executable).with_name("nanodag"))
    places = [text for text in arguments if text.startswith(("--file", "store"))]
    script = job_script(options, [nanodag, "run", *arguments], [nanodag, "server", "stop", *places])
    if is_printed:
        typer.echo(script, nl=False)
        return
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch refused the job: {done.stderr.strip()}\nMore options go by --sbatch OPTION=VALUE.")
    job = done.stdout.strip().partition(";")[0]  # behind it the cluster's name, where there are several
    typer.echo(f"Job {job} runs {name}. Its log: nanodag-{name}.log")
    typer.echo(f"Look with: squeue --job {job}; {command(f'status {name}')}. End it with: scancel {job}")


def sbatch(
    stage: Annotated[str, argument("sbatch.stage")],
    overrides: Overrides = None,
    preset: Preset = "auto",
    on: On = "",
    file: File = "",
) -> None:
    """Print what a stage needs as options of sbatch.

    \b
    sbatch $(nanodag sbatch rl --on 8xH100) docs/templates/slurm.sh POOL
    """
    from nanodag.config import resolve
    from nanodag.host.machine import machine_of
    from nanodag.run.record import pipeline_file
    from nanodag.run.resource_requests import requests_of

    path = pipeline_file(file)
    resolved = resolve(path, preset, overrides or [], machine=machine_of(on) if on else None)
    stages = resolved.pipeline.stages
    if stage not in stages:
        raise ConfigError(f"{path} has no stage {stage!r:.100}; it has {listed(stages)}.{nearest(stage, stages)}")
    print(*requests_of(resolved.pipeline, stage, resolved.machine).sbatch_options())


def _checked(
    on: str, overrides: Sequence[str], *, preset: str, file: str, name: str
) -> tuple[str, list[str], list[str]]:
    """The run's name, the job's options of sbatch and the arguments of `nanodag run` in it. Raises ConfigError for what
    that would refuse."""
    from nanodag.cli.run import known_run
    from nanodag.config import resolve
    from nanodag.host.machine import machine_of
    from nanodag.plan.make import check_plan
    from nanodag.run.preflight import check_names
    from nanodag.run.record import check_name, merged, pipeline_file
    from nanodag.run.resource_requests import requests_of_run

    machine, overrides = machine_of(on), list(overrides)
    os.environ[HOSTFILE] = f"${HOSTFILE}"  # there is one in the job
    if (before := known_run(name, overrides, file=file)) is not None:
        file, preset = file or before.file, before.preset if preset == "auto" else preset
        overrides = merged([*before.overrides, *overrides])
        was = machine_of(before.machine)
        if (was.nodes, was.num_gpus) != (machine.nodes, machine.num_gpus):
            raise ConfigError(f"Run {name} was begun on {was.short}, and goes on there; --on says {machine.short}.")
    path = pipeline_file(file)
    overrides += sampler_nodes(resolve(path, preset, overrides, machine=machine))
    resolved = resolve(path, preset, overrides, machine=machine)
    name = name or f"{resolved.pipeline.preset}-{time.strftime('%m%d-%H%M%S')}"
    check_name(name)
    check_plan(resolved.pipeline, machine)
    check_names(resolved.pipeline, file=path, only_names=True)
    options = [f"--job-name=nanodag-{name}", "--dependency=singleton"]  # two jobs never have one run
    options += requests_of_run(resolved.pipeline, machine).sbatch_options()
    options += [f"--output=nanodag-{name}.log", "--open-mode=append", "--requeue", f"--signal={SIGNAL}"]
    return name, options, ["--name", name, "--preset", resolved.pipeline.preset, f"--file={path}", *overrides]


def sampler_nodes(resolved: "Resolved") -> list[str]:
    """Overrides that give half of the machine's nodes to the samplers of RL, where nobody has said where they lie."""
    from nanodag.config.kinds.rl import RLStage

    half, placed = resolved.machine.nodes // 2, []
    for name, stage in resolved.pipeline.stages.items() if half else ():
        if isinstance(stage, RLStage) and stage.has_trainer and not stage.sampler.has_others:
            settings = ("placement", "sampler.nodes", "resources.nodes")
            if all(resolved.origins[f"{name}.{setting}"].startswith(("default", "derived")) for setting in settings):
                placed += [f"{name}.placement=separate", f"{name}.sampler.nodes={half}"]
    return placed
