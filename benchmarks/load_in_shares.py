"""Memory that a rank takes to load a model under ZeRO-3, until its optimizer is made, as a share of the model.

    python -m benchmarks.load_in_shares                   four ranks, 1.14 GB in float32, in shares and whole
    python -m benchmarks.load_in_shares --depth 2         a smaller model

Peak of the resident set above what the imported process holds (/proc/self/status, VmHWM and VmRSS), the largest of all
ranks. Pages of the model's file count while it is mapped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import psutil
import torch

from nanodag.config.dial import Shape
from nanodag.config.supervised import OptimizerConfig
from nanodag.host.process_memory import peak_bytes
from nanodag.model.build import initialise, qwen3_architecture, qwen3_config
from nanodag.model.decoder import Decoder, Layer
from nanodag.model.folder import load, write_folder
from nanodag.train.deepspeed_engine import TrainEngine, start_ranks


def write_model(folder: Path, depth: int) -> int:
    """Write a model of a depth in float32; its bytes."""
    sizes = {"num_heads": 16, "num_kv_heads": 16, "head_width": 64, "mlp_width": 4096}
    shape = Shape(depth=depth, width=1024, tied_embeddings=True, **sizes)
    model = Decoder(qwen3_architecture(shape, vocabulary=16_384, rope_theta=10_000.0, max_positions=64))
    initialise(model, 0)
    config = qwen3_config(model.architecture)
    write_folder(folder, model.named_parameters(), config=config, dtype=torch.float32, beside=())
    return sum(4 * parameter.numel() for parameter in model.parameters())


def measure(folder: Path, out: Path, *, is_deferred: bool) -> None:
    """Load as a stage does; write the peak when the optimizer is about to be made, and end there."""
    torch.set_num_threads(1)
    start_ranks("cpu")
    before = psutil.Process().memory_info().rss
    peak_bytes()  # the peak begins here

    def end(**_: Any) -> NoReturn:
        peak = peak_bytes()
        torch.distributed.barrier()  # nobody leaves while another still loads
        (out / f"{os.environ['RANK']}.json").write_text(json.dumps(peak - before))
        os._exit(0)

    deepspeed.initialize = end
    TrainEngine(
        load(folder, is_deferred=is_deferred),
        optimizer=OptimizerConfig(name="adamw"),
        zero_stage=3,
        precision="fp32",
        gradient_clipping=1.0,
        leaf_modules=(Layer,),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--how", nargs="+", choices=("shares", "whole"), default=("shares", "whole"))
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # folder, where to write, how
    options = parser.parse_args()
    if options.measure:
        folder, out, how = options.measure
        return measure(Path(folder), Path(out), is_deferred=how == "shares")
    with tempfile.TemporaryDirectory(prefix="nanodag-") as text:
        folder = Path(text)
        num_bytes = write_model(folder / "model", options.depth)
        for how in options.how:
            (out := folder / how).mkdir()
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
            command += ["-m", "benchmarks.load_in_shares", "--measure", str(folder / "model"), str(out), how]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            peaks = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
            print(
                f"{how}: {max(peaks) / num_bytes:.2f} of the model's {num_bytes / 1e9:.2f} GB on {len(peaks)} ranks, "
                f"by rank {', '.join(f'{peak / num_bytes:.2f}' for peak in peaks)}"
            )


if __name__ == "__main__":
    main()
