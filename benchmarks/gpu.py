"""What runs first when a GPU is at hand: does every CUDA path run, is it right, and how fast is it.

    python -m benchmarks.gpu                        every part, one after the other
    python -m benchmarks.gpu check pretrain-12      some of them
    python -m benchmarks.gpu --dry [--on 1xH100]    what would run, and what this machine lacks; needs no GPU
    python -m benchmarks.gpu --tiny                 the same code on a CPU with a toy model: its numbers mean nothing

From a bare checkout: nothing is installed and nothing is fetched. Each case is a process of its own, so that one that
runs out of memory, or fails, ends alone, and its memory is its own. A part takes at most 8 minutes: what is left of it
by then is named as not run. Results go to a file as JSON after every case, and are printed as rows for docs/GPU.md.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanodag.host.machine import Machine, detect, machine_of

ROOT = Path(__file__).resolve().parents[1]
PART_S = 470.0
CASE_S = 240.0
VOCABULARY = 65_536  # the speedrun preset's
GIB = 1 << 30
# What activations, gradients and the head take while a layer is not computed again, in bytes a token, layer and width,
# and what weights, gradients and optimizer take a parameter: from the sizes of the speedrun preset.
ACTIVATION_BYTES, STATE_BYTES = 57, 18
MICRO_BATCHES = (32_768, 16_384, 8_192, 4_096, 2_048)

ENGINE = {"deepspeed": "deepspeed", "hjson": "hjson", "psutil": "psutil", "msgpack": "msgpack", "einops": "einops"}
ENGINE |= {"cpuinfo": "py-cpuinfo", "ninja": "ninja", "cronsim": "cronsim"}
LIBRARY = {"torch": "torch", "transformers": "transformers", "numpy": "numpy", "yaml": "PyYAML"}
LIBRARY |= {"packaging": "packaging", "pydantic": "pydantic", "safetensors": "safetensors", "tokenizers": "tokenizers"}
NEED_TORCH = ("deepspeed", "torch", "transformers")
RL = ENGINE | {"aiohttp": "aiohttp", "tenacity": "tenacity"}
WORKERS = RL | {"httpx": "httpx", "starlette": "starlette", "uvicorn": "uvicorn", "zstandard": "zstandard"}
WORKERS |= {"lm_eval": "lm_eval", "datasets": "datasets", "rustbpe": "rustbpe", "rich": "rich", "jinja2": "Jinja2"}
WORKERS |= {"tensorboard": "tensorboard"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """what: in a line. imports: what its cases import, by the distribution that has it, beside LIBRARY."""

    what: str
    imports: dict[str, str] = field(default_factory=dict)


PARTS = {
    "check": Part(what="every branch that only CUDA takes, against the same on a CPU", imports=RL),
    "stages": Part(what="two steps of every stage, in workers as a run starts them", imports=WORKERS),
    "pretrain-12": Part(what="pretraining at depth 12: tokens/s, MFU, memory", imports=ENGINE),
    "pretrain-20": Part(what="pretraining at depth 20: tokens/s, MFU, memory", imports=ENGINE),
    "sampler": Part(what="the embedded sampler beside Hugging Face generate, Qwen2.5-0.5B's shape"),
    "rl": Part(what="an RL step of Qwen2.5-0.5B's shape, split into its parts", imports=RL),
    "sync": Part(what="new weights from trainer to sampler", imports=ENGINE),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process. measure: a function of benchmarks.gpu_parts, called with the options."""

    part: str
    name: str
    measure: str
    options: dict[str, Any]
    timeout_s: float = CASE_S


def cases_of(part: str, memory: int, *, tiny: bool = False) -> list[Case]:
    """What a part measures on a GPU of so many bytes."""
    device = "cpu" if tiny else "cuda"
    model = "toy" if tiny else "half-billion"
    if part.startswith("pretrain-"):
        return _pretraining(part, memory, device, tiny=tiny)
    if part == "sampler":
        sizes = {"prompt_tokens": 16, "new_tokens": 8} if tiny else {"prompt_tokens": 128, "new_tokens": 128}
        common = {"device": device, "model": model, **sizes}
        return [
            Case(part=part, name=f"{side}, batch {batch}", measure=side, options={**common, "batch": batch})
            for batch in ((1, 4) if tiny else (1, 64, 256))
            for side in ("embedded", "generate")
        ]
    if part == "rl":
        sizes = {"prompts": 2, "samples": 4, "prompt_tokens": 12, "new_tokens": 8, "micro_batch_tokens": 64}
        if not tiny:
            sizes = {"prompts": 32, "samples": 8, "prompt_tokens": 128, "new_tokens": 512, "micro_batch_tokens": 9216}
        common = {"device": device, "model": model, **sizes}
        return [
            Case(part=part, name=f"ZeRO {zero}", measure="rl", options={**common, "zero_stage": zero})
            for zero in ((1,) if tiny else (1, 3))
        ]
    return [Case(part=part, name=part, measure=part, options={"device": device, "model": model}, timeout_s=PART_S)]


def _pretraining(part: str, memory: int, device: str, *, tiny: bool) -> list[Case]:
    depth = 2 if tiny else int(part.removeprefix("pretrain-"))
    micro = 512 if tiny else micro_batch_tokens(depth, memory)
    common = {"device": device, "depth": depth, "vocabulary": 512 if tiny else VOCABULARY}
    common |= {"sequence_length": 128 if tiny else 2048, "micro_batch_tokens": micro, "micro_batches": 2}
    common |= {"zero_stage": 1, "compile": not tiny, "checkpointing": False, "precision": "fp32" if tiny else "bf16"}
    variants: dict[str, dict[str, Any]] = {
        "ZeRO 1": {},
        "ZeRO 0": {"zero_stage": 0},
        "ZeRO 2": {"zero_stage": 2},
        "ZeRO 3": {"zero_stage": 3},
        "ZeRO 1, not compiled": {"compile": False},
        "ZeRO 1, checkpointing": {"checkpointing": True},
    }
    if tiny:
        variants = {name: variants[name] for name in ("ZeRO 1", "ZeRO 1, checkpointing")}
    return [
        Case(part=part, name=name, measure="pretrain", options=common | changes) for name, changes in variants.items()
    ]


def micro_batch_tokens(depth: int, memory: int) -> int:
    """The largest micro-batch whose activations, not computed again, take four fifths of what state leaves."""
    from nanodag.config.dial import num_parameters, shape_of

    shape = shape_of(depth)
    free = memory - STATE_BYTES * num_parameters(shape, VOCABULARY)["total"]
    fitting = [n for n in MICRO_BATCHES if ACTIVATION_BYTES * shape.width * depth * n <= 0.8 * free]
    return fitting[0] if fitting else MICRO_BATCHES[-1]


def lacking(parts: Sequence[str]) -> dict[str, list[str]]:
    """The distributions that each part lacks here."""
    return {
        part: sorted({name for module, name in (LIBRARY | PARTS[part].imports).items() if not _is_here(module)})
        for part in parts
    }


def _is_here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def how_to_get(names: Sequence[str]) -> str:
    """Commands that bring distributions to a machine without a network, at the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower().replace("_", "-"): line for line in lines}
    wanted = [pins.get(name.lower().replace("_", "-"), name) for name in sorted(set(names))]
    alone = [name for name in wanted if name.partition("==")[0] in NEED_TORCH]  # which is there, and large
    lines = [f"pip wheel --no-deps -w wheels {' '.join(alone)}"] if alone else []
    if others := [name for name in wanted if name not in alone]:
        lines.append(f"pip wheel -c constraints.txt -w wheels {' '.join(others)}")
    brought = ["  where there is a network:", *(f"    {line}" for line in lines)]
    return "\n".join([*brought, "  here:", "    pip install --no-index --no-deps wheels/*.whl"])


def versions() -> dict[str, str]:
    """Of Python and what matters most, `none` for what is not here."""

    def of(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    return {"python": sys.version.split()[0], **{name: of(name) for name in ("torch", "transformers", "deepspeed")}}


def untested(found: dict[str, str]) -> list[str]:
    """Versions outside the ranges of pyproject.toml, as sentences."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    ranges = {one.name: one.specifier for one in requirements}
    ranges["python"] = Requirement(f"python{project['requires-python']}").specifier
    return [
        f"{name} {version} is outside of what was tested, {ranges[name]}"
        for name, version in found.items()
        if version != "none" and not ranges[name].contains(version.partition("+")[0])
    ]


def main() -> None:
    options = _options()
    machine = machine_of(options.on) if options.dry and options.on else detect()
    parts = options.parts or list(PARTS)
    found = versions()
    missing = lacking(parts)
    if names := sorted({name for part in missing.values() for name in part}):
        print(f"lacking: {', '.join(names)}\n{how_to_get(names)}")
    if lacks_library := sorted(set(names) & set(LIBRARY.values())):
        raise SystemExit(f"No part can be planned without {', '.join(lacks_library)}.")
    for sentence in untested(found):
        print(f"note: {sentence}")
    if not options.tiny and (reasons := no_gpu(machine, found["torch"])):
        print("\n".join(f"lacking: {reason}" for reason in reasons))
        if not options.dry:
            raise SystemExit(1)
    memory = machine.gpu.memory if machine.gpu else 79 * GIB
    todo = {part: cases_of(part, memory, tiny=options.tiny) for part in parts}
    if options.dry:
        print(planned(todo, missing))
        return
    results = [
        result
        for part, cases in todo.items()
        for result in (_run(part, cases, missing[part], options, str(machine), found))
    ]
    print("\n".join(rows(results)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--dry", action="store_true", help="only say what would run")
    parser.add_argument("--on", metavar="MACHINE", help="with --dry: as on this machine, such as 1xH100")
    parser.add_argument("--tiny", action="store_true", help="on a CPU with a toy model")
    parser.add_argument("--out", type=Path, default=Path("gpu-results.jsonl"), help="results are added to this file")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def no_gpu(machine: Machine, torch_version: str) -> list[str]:
    """Why nothing can be measured here."""
    reasons = [] if machine.gpu else [f"a GPU that nvidia-smi names; this is {machine}"]
    return reasons + ([f"a torch that is built for CUDA; this is {torch_version}"] if "+cpu" in torch_version else [])


def planned(todo: dict[str, list[Case]], missing: dict[str, list[str]]) -> str:
    """The cases of each part, or why it cannot run."""
    lines = []
    for part, cases in todo.items():
        lines.append(f"{part}: {PARTS[part].what}; at most {PART_S / 60:.0f} minutes")
        if missing[part]:
            lines.append(f"  cannot run here, lacking {', '.join(missing[part])}")
        lines += [f"  {case.name}: {json.dumps(case.options)}" for case in cases]
    return "\n".join(lines)


def _run(
    part: str, cases: list[Case], missing: list[str], options: argparse.Namespace, machine: str, found: dict[str, str]
) -> list[dict[str, Any]]:
    """Measure a part; a result for each case, which is in the file before the next begins."""
    deadline = time.monotonic() + PART_S
    results = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="nanodag-gpu-", dir=memory) as folder:
        for case in cases:
            left = deadline - time.monotonic()
            if missing:
                numbers: dict[str, Any] = {"not_run": f"lacking {', '.join(missing)}"}
            elif left < 20.0:
                numbers = {"not_run": f"the {PART_S / 60:.0f} minutes of this part were over"}
            else:
                numbers = _measured(case, Path(folder), min(left, case.timeout_s))
            results.append({"part": part, "case": case.name, **numbers})
            record = results[-1] | {"options": case.options, "machine": machine, "versions": found, "time": time.time()}
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(results[-1]), flush=True)
    return results


def _measured(case: Case, folder: Path, timeout_s: float) -> dict[str, Any]:
    from nanodag.worker.launch import worker_environment

    threads = len(os.sched_getaffinity(0))
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment = worker_environment(threads, device=case.options["device"], gpus=first_gpu)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_parts", json.dumps(asdict(case)), str(folder)]
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, _ = process.communicate()
        return {"failed": f"took more than {timeout_s:.0f} s", "log": out[-2000:]}
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"failed": f"exit code {process.returncode}", "log": out[-4000:]}
    return json.loads(lines[-1].removeprefix("RESULT ")) | {"case_s": round(time.monotonic() - began, 1)}


def rows(results: Sequence[dict[str, Any]]) -> list[str]:
    """Rows for docs/GPU.md: what was measured, and its numbers."""
    lines = ["| what | measured |", "|---|---|"]
    for result in results:
        numbers = _flat({k: v for k, v in result.items() if k not in ("part", "case", "log", "case_s")})
        shown = ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in numbers.items())
        lines.append(f"| {result['part']}: {result['case']} | {shown} |")
    return lines


def _flat(numbers: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in numbers.items():
        found |= _flat(value, f"{before}{name} ") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    main()
