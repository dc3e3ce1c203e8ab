"""`python -m nanodag.train.checkpoint_model WORKSPACE CHECKPOINT FOLDER`: the model of a stage that is under way.

Writes the weights of one of its checkpoints as a Hugging Face directory, such as the stage itself leaves at its end.
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from nanodag.errors import ConfigError, NanodagError
from nanodag.model.decoder import Decoder
from nanodag.model.folder import CausalModel, load, save
from nanodag.train.checkpoint import saved_state
from nanodag.train.optimizer import Segment
from nanodag.train.setup import architecture_of, with_extension
from nanodag.worker.job import read_job

PREFIX = "decoder."  # of the names of RL's policy


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """The master weights, float32, by their names in the model. Raises CorruptArtifact where a part is missing."""
    weights = {}
    with saved_state(checkpoint) as saved:
        for name, shape in saved.shapes.items():
            flat = torch.empty(math.prod(shape))
            whole = Segment(name=name, shape=shape, flat=0, start=0, offset=0, length=len(flat))
            saved.fill("weights", whole, flat)
            weights[name.removeprefix(PREFIX)] = flat.view(shape)
    return weights


def main() -> int:
    workspace, checkpoint, folder = map(Path, sys.argv[1:])
    try:
        job = with_extension(read_job(workspace / "job.json"))
        source = job.inputs.get("model")
        tokenizer = job.inputs["tokenizer"] if source is None else source
        weights = weights_of(checkpoint)
        if source is None:
            with torch.device("meta"):
                model: CausalModel = Decoder(architecture_of(job, tokenizer))
        else:
            model = load(source, is_deferred=True)
        names = {name for name, _ in model.named_parameters()}
        if names != weights.keys():
            odd = min(names ^ weights.keys())
            raise ConfigError(
                f"{checkpoint} has not the weights of a whole model ({odd}): a stage that trains adapters leaves its "
                "model at its end."
            )
        save(folder, weights, tokenizer=tokenizer, source=source, model=model)
    except (NanodagError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
