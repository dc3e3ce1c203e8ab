"""Shape of a checkpoint by its config.json, for the model types that can be trained and sampled here.

Everything that would change the result and is not built here (another activation, other kinds of rotary scaling ...)
is refused by name: a checkpoint that loads is a checkpoint that is computed as transformers does.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanodag.errors import BadRequest, ConfigError
from nanodag.errors.words import listed
from nanodag.host.beside import table_beside
from nanodag.inference.sglang_options import check_no_window

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
MOST_LAYERS = 10_000
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ModelCode = Literal["own", "transformers"]
MODEL_CODE = "nanodag_model_code"
"""Key of config.json by which a model says whose code computes it."""
# Names of a size among model types.
_SIZES: dict[str, list[str]] = table_beside(__file__, "size_names.yaml")
UNBOUNDED_POSITIONS = 32_768  # of a model that names no longest context, as one of states alone


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding. low_freq_factor, high_freq_factor: of llama3.
    beta_fast, beta_slow: of YaRN. original_positions: of both."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 0.0
    beta_slow: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes and constants of one decoder. Two checkpoints with equal architectures can take each other's weights.

    window: tokens that one sees in the windowed layers, itself among them; None where no layer is windowed.
    unrotated_layers: layers that do not know positions (NoPE, arXiv:2501.18795). model_code: transformers for a model
    that its classes compute, of which only the sizes are known here. active_experts: share of the experts' weights that
    a token is multiplied with.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    rope: Rope
    max_positions: int
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    model_code: ModelCode = "own"
    active_experts: float = 1.0

    def window_of(self, layer: int) -> int | None:
        """Tokens that one sees in this layer, itself among them; None: all before it."""
        return self.window if layer in self.windowed_layers else None

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: for each key/value head its query heads, the key, the value."""
        return self.num_kv_heads * (self.heads_per_kv + 2) * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A Hugging Face folder as its JSON files describe it; tensors are read later."""

    path: Path
    architecture: Architecture
    dtype: str
    eos_token_ids: tuple[int, ...]
    class_names: tuple[str, ...]


def read_checkpoint(path: Path, model_code: str = "") -> ModelFolder:
    """The architecture, stored dtype and end-of-sequence ids of the Hugging Face folder at ``path``.

    model_code: whose code computes it, instead of what the folder says. End-of-sequence ids come from
    generation_config.json where it names some, else from config.json.

    Raises BadRequest: no such folder, no readable config.json, or an architecture that is not built here.
    """
    config_path = path / "config.json"
    if not os.path.exists(config_path):
        raise BadRequest(
            f"no config.json in {str(path)!r:.200}: model_path must be the folder of a Hugging Face checkpoint"
        )
    config = read_json(config_path)
    with _described_by(config_path):
        is_own = (model_code or config.get(MODEL_CODE, "own")) == "own"
        architecture = (_architecture if is_own else _by_transformers)(config, config_path)
        for name in (*SIZES, "vocab_size"):
            if getattr(architecture, name) < 1:
                raise BadRequest(f"{config_path}: {name} is {getattr(architecture, name)}")
        if (depth := architecture.num_layers) > MOST_LAYERS:
            raise BadRequest(f"{config_path}: num_layers is {depth}; at most {MOST_LAYERS} are built here")
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if os.path.exists(generation_path) else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    names = config.get("architectures")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(token) is int for token in eos_ids):
        raise BadRequest(f"eos_token_id in {path} is {str(eos)[:80]}, which is neither a token id nor a list of them")
    return ModelFolder(
        path=path,
        architecture=architecture,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=eos_ids,
        class_names=tuple(map(str, names)) if isinstance(names, list) else (),
    )


def vocabulary_and_positions(folder: Path) -> tuple[int, int]:
    """Tokens of a model's vocabulary, and of its longest context; also of a type that SGLang alone computes. Raises
    BadRequest for what describes no model."""
    path = folder / "config.json"
    config = read_json(path)
    if config.get(MODEL_CODE) == "transformers":
        of = read_checkpoint(folder).architecture
        return of.vocab_size, of.max_positions
    with _described_by(path):
        return int(config["vocab_size"]), int(config["max_position_embeddings"])


def check_sglang(folder: Path, context: int | None, setting: str) -> None:
    """Raise ConfigError where SGLang would compute a model otherwise than transformers does, BadRequest for what
    describes no model. context: tokens of prompt and answer together; None for all positions of the model. setting:
    that asks for SGLang."""
    path = folder / "config.json"
    config = read_json(path)
    if config.get("model_type") in MODEL_TYPES and "num_hidden_layers" in config:
        with _described_by(path):
            window = _windows(config, path).get("window")
            longest = int(config.get("max_position_embeddings", 0)) if context is None else context
        if config["model_type"] == "smollm3":
            raise ConfigError(f"{setting}: sglang has no class of its own for smollm3 models. Set it to embedded.")
        check_no_window(window, longest, setting)


@contextmanager
def _described_by(config_path: Path) -> Iterator[None]:
    """Raise BadRequest for a value of config.json that nothing can be made of."""
    try:
        yield
    except BadRequest:
        raise
    except KeyError as error:
        raise BadRequest(f"{config_path} lacks {error.args[0]!r}") from error
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise BadRequest(f"{config_path} does not describe a model: {error}") from error


SIZES = ("head_dim", "hidden_size", "intermediate_size", "max_positions", "num_heads", "num_kv_heads", "num_layers")


LAYER_UNIT = 16


def cpu_layer_fits(*, width: int, head_dim: int, mlp_width: int) -> bool:
    """True where `layer.c`, which computes layers on a CPU, takes a model of these widths."""
    return not any(size % LAYER_UNIT for size in (width, head_dim // 2, mlp_width))


def check_same_shape(folder: ModelFolder, architecture: Architecture) -> None:
    """Raise BadRequest where a folder's weights are not of this shape. Their longest context may be another."""
    differing = [
        f"{name} {getattr(folder.architecture, name)} instead of {getattr(architecture, name)}"
        for name in Architecture.__dataclass_fields__
        if name != "max_positions" and getattr(folder.architecture, name) != getattr(architecture, name)
    ]
    if differing:
        raise BadRequest(f"the checkpoint in {folder.path} is of another shape: {', '.join(differing)}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a checkpoint. Raises BadRequest where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{path!s:.200} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequest(f"{path} holds a {type(content).__name__}, not an object")
    return content


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object into a file of a checkpoint. It is not synced to the disk, as a weight sync writes such, too."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _architecture(config: dict[str, Any], source: Path) -> Architecture:
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise BadRequest(
            f"model_type {model_type!r} in {source} is not built here; {listed(MODEL_TYPES)} are. An import with "
            "model_code: transformers takes the others"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise BadRequest(f"hidden_act {activation!r} in {source} is not built here; only 'silu' is")
    for key in ("mlp_bias", "quantization_config"):
        if config.get(key):
            raise BadRequest(f"{key} in {source} is not built here")
    num_heads = int(config["num_attention_heads"])
    has_bias = model_type != "mistral" and bool(config.get("attention_bias"))
    unrotated = _unrotated(config, source) if model_type == "smollm3" else ()
    hidden_size = int(config["hidden_size"])
    architecture = Architecture(
        model_type=model_type,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        # Qwen3's own default is 128, whatever hidden_size / num_heads says.
        head_dim=int(config.get("head_dim") or (128 if model_type == "qwen3" else hidden_size // num_heads)),
        intermediate_size=int(config["intermediate_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", model_type == "smollm3")),
        qk_norm=model_type == "qwen3",
        rope=_rope(config, source),
        max_positions=int(config["max_position_embeddings"]),
        # As transformers: Qwen2 has the first three whatever attention_bias says, Mistral none, the others all four
        # or none.
        qkv_bias=model_type == "qwen2" or has_bias,
        output_bias=model_type != "qwen2" and has_bias,
        unrotated_layers=unrotated,
        **_windows(config, source),
    )
    if architecture.num_heads % architecture.num_kv_heads:
        raise BadRequest(f"{source}: {num_heads} heads cannot share {architecture.num_kv_heads} key/value heads evenly")
    return architecture


def _by_transformers(config: dict[str, Any], source: Path) -> Architecture:
    """Sizes of a model of any type; what else it has is known to transformers' class of that type."""
    model_type = config.get("model_type")
    config = {**config, **(config.get("text_config") or {})}  # of a model that reads images
    if config.get("quantization_config"):
        raise BadRequest(f"quantization_config in {source}: quantised weights are not trained or sampled here")
    if config.get("auto_map") and not isinstance(model_type, str):
        raise BadRequest(f"{source} names no model_type of transformers; a model's own code is never run")
    found: dict[str, Any] = {
        size: next((config[n] for n in names if config.get(n)), None) for size, names in _SIZES.items()
    }
    for size in ("hidden_size", "num_layers"):
        if found[size] is None:
            raise BadRequest(f"{source} does not say {size} as {listed(_SIZES[size])}, the names that are known here")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]  # some layers have their own
    if any(rope.get("rope_type", rope.get("type")) == "dynamic" for rope in ropes):
        raise BadRequest(f"rope_type dynamic in {source}: angles that follow the text's length are not built here")
    # Beyond the original context longrope has other angles, for all of a text: up to there it is one model.
    longest = [rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
               for rope in ropes if rope.get("rope_type", rope.get("type")) == "longrope"]  # fmt: skip
    max_positions = min([int(found["max_positions"] or UNBOUNDED_POSITIONS), *(int(each) for each in longest if each)])
    hidden_size, num_heads = int(found["hidden_size"]), int(found["num_heads"] or 1)
    return Architecture(
        model_type=str(model_type),
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        num_layers=int(found["num_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or max(hidden_size // num_heads, 1)),
        intermediate_size=int(found["intermediate_size"] or 4 * hidden_size),
        norm_eps=0.0,
        tied=bool(config.get("tie_word_embeddings", True)),
        qk_norm=False,
        rope=Rope(theta=0.0, kind="transformers"),
        max_positions=max_positions,
        model_code="transformers",
        active_experts=active_share(config),
    )


def active_share(config: dict[str, Any]) -> float:
    """Share of its experts' weights that a model of this config.json multiplies a token with; 1.0 without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((int(config[name]) for name in names if config.get(name)), 0)
    return min(1.0, int(config.get("num_experts_per_tok") or 1) / num_experts) if num_experts else 1.0


def _num_layers(config: dict[str, Any], source: Path) -> int:
    num_layers = int(config["num_hidden_layers"])
    if num_layers > MOST_LAYERS:  # numbers of layers are kept
        raise BadRequest(f"{source}: num_hidden_layers is {num_layers}; at most {MOST_LAYERS} are built here")
    return num_layers


def _unrotated(config: dict[str, Any], source: Path) -> tuple[int, ...]:
    """A SmolLM3's layers without positions: where no_rope_layers has 0, else every no_rope_layer_interval-th. Source:
    transformers 5.23, configuration_smollm3.py."""
    num_layers, rotates = _num_layers(config, source), config.get("no_rope_layers")
    if rotates is None:
        every = int(config.get("no_rope_layer_interval", 4))
        rotates = [(number + 1) % every for number in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or {type(each) for each in rotates} != {int}:
        raise BadRequest(f"no_rope_layers in {source} is not a whole number for each of {num_layers} layers")
    return tuple(number for number, rotated in enumerate(rotates) if not rotated)


def _windows(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """The sliding window and the numbers of its layers, as transformers' configurations have them: all layers of a
    Mistral; of a Qwen with use_sliding_window those from max_window_layers on, or those that layer_types name."""
    model_type, kinds = config["model_type"], config.get("layer_types")
    is_windowed = model_type == "mistral" or (model_type != "llama" and config.get("use_sliding_window"))
    window = config.get("sliding_window", None if model_type == "smollm3" else 4096) if is_windowed else None
    num_layers = _num_layers(config, source)
    first = 0 if model_type == "mistral" or window is None else int(config.get("max_window_layers", 28))
    layers = () if window is None else tuple(range(first, num_layers))
    if model_type == "smollm3" and window is not None:
        layers = _unrotated(config, source)
    if kinds is not None:
        named = tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
        has_others = not set(kinds) <= {"full_attention", "sliding_attention"}
        is_free = model_type != "mistral" and window is not None
        if has_others or len(kinds) != num_layers or (named != layers and not is_free):
            raise BadRequest(
                f"layer_types in {source} are not built here for a {model_type} model with sliding_window {window} for "
                f"layers {list(layers)}: {kinds!s:.200}"
            )
        layers = named
    if window is None or not layers:
        return {}
    if int(window) < 1:
        raise BadRequest(f"{source}: sliding_window is {window}; a token sees itself at least")
    return {"window": int(window), "windowed_layers": layers}


def _rope(config: dict[str, Any], source: Path) -> Rope:
    # transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    settings = config.get("rope_parameters") or {**(config.get("rope_scaling") or {})}
    usual = 2e6 if config["model_type"] == "smollm3" else 1e4
    theta = settings.get("rope_theta", config.get("rope_theta", usual))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise BadRequest(f"rope_type {kind!r} in {source} is not built here; {listed(ROPE_TYPES)} are")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise BadRequest(f"partial_rotary_factor {partial} in {source} is not built here; only 1.0 is")
    options: dict[str, float] = {}
    if kind == "llama3":
        options = {name: float(settings[name]) for name in ("low_freq_factor", "high_freq_factor")}
    if yarn := kind == "yarn":
        options = {n: float(settings.get(n) or usual) for n, usual in (("beta_fast", 32), ("beta_slow", 1))}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if settings.get(name) is not None:
                raise BadRequest(f"{name} of a yarn rope in {source} is not built here; what follows from factor is")
        if not settings.get("truncate", True):
            raise BadRequest(f"truncate false of a yarn rope in {source} is not built here")
    original = 0
    if options:  # transformers takes the one beside the settings before the one in them
        name = "original_max_position_embeddings"
        nested = settings.get(name, config["max_position_embeddings"])
        original = int(nested if config.get(name) is None else config[name])
    rope = Rope(
        theta=float(theta),
        kind=kind,
        factor=float(settings["factor"]) if kind != "default" else 1.0,
        original_positions=original,
        **options,
    )
    if yarn and not (rope.theta > 1 and min(rope.factor, original, rope.beta_fast, rope.beta_slow) > 0):
        raise BadRequest(f"{source}: no frequencies follow from {rope}")
    return rope
