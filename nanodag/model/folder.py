"""Reads and writes a model as a plain Hugging Face directory, which transformers, SGLang and vLLM load as it is."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanodag.errors import ConfigError
from nanodag.errors.words import counted
from nanodag.host.images import SETTINGS_FILES
from nanodag.model.architecture import read_checkpoint, read_json, write_json
from nanodag.model.build import qwen3_config
from nanodag.model.decoder import Decoder
from nanodag.model.generation import GENERATION_FILE, TOKEN_IDS, generation_config
from nanodag.model.headers import INDEX, faults_of_config, weight_files
from nanodag.model.lora import additions
from nanodag.model.scorer import ScalarHead, Scorer

if TYPE_CHECKING:
    from nanodag.model.transformers_model import TransformersModel

CausalModel: TypeAlias = "Decoder | TransformersModel"
"""A causal language model on packed rows, by our own code or by transformers' classes."""

SHARD_BYTES = 4 << 30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    *SETTINGS_FILES,
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class StoredTensor(NamedTuple):
    """Place of a tensor that was not read yet: a safetensors file and its name there."""

    path: Path
    name: str

    def read_into(self, tensor: Tensor) -> None:
        """Fill a tensor of its shape, of any precision and device; the file is mapped meanwhile only."""
        with safe_open(str(self.path), framework="pt") as file:
            tensor.copy_(file.get_tensor(self.name))


@faults_of_config()
def load(
    folder: Path,
    *,
    compiled: bool = False,
    activation_checkpointing: bool = False,
    is_deferred: bool = False,
    scores: bool = False,
) -> CausalModel:
    """The model in a Hugging Face directory, in float32 on CPU. is_deferred: its parameters take no memory yet (torch's
    `meta` device), and each has its StoredTensor as `stored`, for a TrainEngine that reads them in shares; one that
    transformers computes is read whole. scores: a Scorer in its place, whose head is read where the folder has one.

    Raises ConfigError when its architecture is not built here, its weights are no safetensors, or a tensor is missing,
    unknown or of another shape.
    """
    architecture = read_checkpoint(folder).architecture
    if architecture.model_code == "transformers":
        from nanodag.model.transformers_model import TransformersModel, TransformersScorer

        return (TransformersScorer if scores else TransformersModel)(
            folder, architecture, activation_checkpointing=activation_checkpointing
        )
    with torch.device("meta" if is_deferred else "cpu"):
        of_class = Scorer if scores else Decoder
        model = of_class(architecture, compiled=compiled, activation_checkpointing=activation_checkpointing)
    parameters: dict[str, Any] = dict(model.named_parameters())
    loaded_names = set()
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name == "lm_head.weight" and (architecture.tied or scores):
                    continue
                if name not in parameters:
                    raise ConfigError(f"{path} holds {name}, which a {architecture.model_type} model does not have.")
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(parameters[name].shape):
                    raise ConfigError(
                        f"{name} in {path} has shape {shape}; config.json says {tuple(parameters[name].shape)}."
                    )
                if is_deferred:
                    parameters[name].stored = StoredTensor(path, name)
                else:
                    parameters[name].data.copy_(file.get_tensor(name))
                loaded_names.add(name)
    if missing := sorted(set(parameters) - loaded_names - ({"score.weight"} if scores else set())):
        raise ConfigError(f"{folder} lacks {counted(len(missing), 'tensor')}, the first is {missing[0]}.")
    return model


def read_tensors(folder: Path, names: Sequence[str]) -> list[Tensor]:
    """Some tensors of a Hugging Face directory, on the CPU. Raises KeyError for one that it does not hold."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(str(path), framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in set(names) & set(file.keys())}
    return [tensors[name] for name in names]


def write_folder(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    beside: Iterable[Path],
    generation: Mapping[str, Any] | None = None,
    is_writer: bool = True,
    on_tensor: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Write a Hugging Face directory. It appears under its name only when it is whole, in the place of an earlier one.

    weights: (name, tensor) pairs of the model as transformers names them; each tensor is valid until the next is asked
    for. Every rank walks through them; only the writer keeps and writes, one shard of at most 4 GiB at a time. config:
    of config.json, whose dtype is set. beside: files that are copied: tokenizer, chat template. generation: of
    generation_config.json, where that is none of them. on_tensor: gets every tensor as the writer holds it.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    if is_writer:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    names: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = size = 0
    files: list[str] = []

    def flush() -> None:
        nonlocal held, size
        files.append(f"part-{len(files):05d}")
        save_file(held, temporary / files[-1], metadata={"format": "pt"})
        names.update(dict.fromkeys(held, files[-1]))
        held, size = {}, 0

    for name, tensor in weights:
        if not is_writer:
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if held and size + num_bytes > SHARD_BYTES:
            flush()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if on_tensor is not None:
            on_tensor(name, held[name])
        size += num_bytes
        total += num_bytes
    if not is_writer:
        return
    flush()
    _name_shards(temporary, files, names, total)
    for path in beside:
        shutil.copyfile(path, temporary / path.name)
    if generation is not None:
        write_json(temporary / GENERATION_FILE, generation)
    kept = {name: value for name, value in config.items() if name != "torch_dtype"}  # as before transformers 5
    write_json(temporary / "config.json", {**kept, "dtype": str(dtype).removeprefix("torch.")})
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(temporary, folder)


def write_like(source: Path, folder: Path, weights: Iterable[tuple[str, Tensor]], **options: Any) -> None:
    """`write_folder`, with the files of `source` that are not weights: config, tokenizer, chat template."""
    files = (path for path in sorted(source.iterdir()) if path.is_file())
    beside = [path for path in files if path.name != "config.json" and not path.name.endswith(WEIGHT_SUFFIXES)]
    write_folder(folder, weights, config=read_json(source / "config.json"), beside=beside, **options)


def write_merged(folder: Path, adapter: Path) -> None:
    """Add an adapter of peft's format to the weights in a model's folder, in their precision. Raises ConfigError for
    one of another model."""
    sums = additions(adapter)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for path in weight_files(folder):
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_tensor(name)
                    if (addition := sums.pop(name, None)) is not None and addition.shape != tensor.shape:
                        raise ConfigError(f"{adapter}: {name} is {tuple(addition.shape)}, the model's {tensor.shape}.")
                    yield name, tensor if addition is None else (tensor.float() + addition).to(tensor.dtype)

    whole = folder.with_name(f"{folder.name}-merged")
    with safe_open(str(weight_files(folder)[0]), framework="pt") as file:
        dtype = file.get_tensor(next(iter(file.keys()))).dtype
    write_like(folder, whole, tensors(), dtype=dtype)
    if sums:
        shutil.rmtree(whole)
        raise ConfigError(f"{adapter} adapts {counted(len(sums), 'tensor')} that the model lacks: {min(sums)}.")
    shutil.rmtree(folder)
    os.rename(whole, folder)


def save(
    folder: Path, weights: dict[str, Tensor], *, tokenizer: Path, source: Path | None = None, model: CausalModel
) -> None:
    """`write_folder`, of a model that was trained here.

    weights: by the model's names, whole; a tied head may be among them and is left out. tokenizer: a folder whose
    tokenizer files are copied, and named in generation_config.json. source: the folder whose config.json is kept;
    without it one is written for the model's architecture and the tokenizer's ids.
    """
    kept = model.checkpoint(weights)
    beside = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    config = qwen3_config(model.architecture) if source is None else read_json(source / "config.json")
    generation = generation_config(tokenizer, config)
    if source is None:
        config |= {name: generation[name] for name in TOKEN_IDS if name in generation}
    if isinstance(model, ScalarHead):
        config = model.labelled(config, generation)
    dtype = next(iter(kept.values())).dtype
    write_folder(folder, kept.items(), config=config, dtype=dtype, beside=beside, generation=generation)


def _name_shards(folder: Path, files: list[str], names: dict[str, str], total: int) -> None:
    """Give shards the names that transformers looks for, with an index when there are several."""
    if len(files) == 1:
        os.rename(folder / files[0], folder / "model.safetensors")
        return
    final = {part: f"model-{number:05d}-of-{len(files):05d}.safetensors" for number, part in enumerate(files, start=1)}
    for part, name in final.items():
        os.rename(folder / part, folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: final[part] for name, part in sorted(names.items())},
    }
    write_json(folder / INDEX, index)
