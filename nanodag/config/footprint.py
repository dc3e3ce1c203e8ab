"""Memory of a model where it is trained and where it samples: arithmetic on shapes, no torch.

    shape, parameters = shape_of(24), num_parameters(shape_of(24), 32768)
    state = train_state(parameters, precision="bf16", zero_stage=1, num_ranks=8, optimizer="muon")
    state.total + activations(shape, 32768, precision="bf16")

Bytes of one process, as the engines of this package hold them at their highest (nanodag.train.deepspeed_engine with
DeepSpeed 0.19.8, nanodag.model.decoder, nanodag.rl.trainer, nanodag.sampler.kernel).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nanodag.config.dial import Shape
from nanodag.config.section import Precision
from nanodag.inference.cache_size import PREFILL_TOKENS
from nanodag.inference.number_formats import width_of
from nanodag.registry import optimizer_named

FLOAT = 4
FOUR_BITS = 0.5 + 4 / 64  # of a weight with its share of a block's scale, at most
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's reduce_bucket_size, from ZeRO 1 in float32 and ZeRO 2 in bfloat16 on
LIVE_ELEMENTS = 1_000_000_000  # its stage3_max_live_parameters
HEAD_BLOCK_BYTES = 256 << 20  # of logits that the head holds at once
MAX_LOGITS = {"cuda": 1 << 25, "cpu": 1 << 22}  # numbers that scoring holds at once: on a CPU 16 MB, near its caches

CUDA_BYTES = 1 << 30
"""Memory of a GPU that a process takes before its first tensor: CUDA's context, NCCL's and cuBLAS's buffers. Not
measured."""
USABLE = 0.95
"""Share of a GPU's memory that tensors can fill: the rest is lost between blocks. Not measured."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Bytes that a rank holds between two steps and while it takes one. host: of that, what lies in host memory
    where the device is a GPU and the optimizer is offloaded; it is part of no other field."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    host: int = 0

    @property
    def on_device(self) -> dict[str, int]:
        """Bytes on the device, by what they are."""
        return {name: value for name, value in vars(self).items() if name != "host"}

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.on_device.values())


def train_state(
    parameters: Mapping[str, int],
    *,
    precision: Precision | str,
    zero_stage: int,
    num_ranks: int,
    optimizer: str = "adamw",
    device: str = "cuda",
    offload_optimizer: bool = False,
    offload_param: bool = False,
    trained: int | None = None,
    matrix_bytes: float = 0.0,
) -> TrainState:
    """A rank's share of a model under training. parameters: as of `num_parameters`. trained: how many get gradients
    (LoRA's adapters); all unless given. matrix_bytes: of a weight in the matrices below them, 0 for whole ones.

    Master weights and the optimizer's states are float32. What DeepSpeed holds beside them differs by stage and
    precision:

    - stage 0: gradients in the training precision, and in bfloat16 a float32 copy of them while a step is taken;
    - stage 1 in bfloat16: gradients twice, whole on every rank, in bfloat16 and summed in float32;
    - stage 1 in float32 and stage 2: whole gradients until their bucket is reduced, then shards in float32, which a
      step copies once;
    - stage 3: as stage 2, with weights gathered while they are used; one rank gathers nothing.
    """
    total = parameters["total"]
    extra = trained if trained is not None else 0
    learned = extra or total
    wide, shard = width_of(precision), num_ranks if zero_stage else 1
    bf16 = precision != "fp32"
    traits = optimizer_named(optimizer)
    master = FLOAT * learned if bf16 or zero_stage else 0
    states = -(-(master + FLOAT * num_states(parameters, optimizer, learned)) // shard)
    weights = wide * (total + extra) + int(((matrix_bytes or wide) - wide) * parameters["matrices"])
    bucket = min(learned, BUCKET_ELEMENTS)
    reserved = BUCKET_ELEMENTS if device == "cuda" else bucket  # a CPU's memory is taken when it is written
    if zero_stage == 0:
        gradients, buffers = (wide + (FLOAT if bf16 else 0)) * learned, 0
    elif zero_stage == 1 and bf16 and not offload_optimizer:
        gradients, buffers = (wide + FLOAT) * learned, 0
    elif zero_stage == 1:
        gradients, buffers = FLOAT * learned + -(-FLOAT * learned // shard), FLOAT * reserved
    else:
        gradients, buffers = wide * bucket + 2 * -(-FLOAT * learned // shard), wide * reserved
    if zero_stage == 3:
        gathered = wide * min(total, LIVE_ELEMENTS) if num_ranks > 1 else 0
        weights = -(-weights // shard) + gathered
    buffers += traits.work_copies * wide * min(parameters["matrices"], traits.work_elements)
    host = 0
    if offload_optimizer:
        shards = 2 * -(-FLOAT * learned // shard)  # of gradients, and a pinned copy
        host, gradients, states = states + shards, max(0, gradients - shards), 0
    if offload_param:
        resting = -(-wide * (total + extra) // shard)
        host, weights = host + resting, weights - resting if num_ranks > 1 else wide * min(total, LIVE_ELEMENTS)
    return TrainState(weights=weights, gradients=gradients, optimizer=states, buffers=buffers, host=host)


def num_states(parameters: Mapping[str, int], optimizer: str, learned: int) -> int:
    """Float32 numbers that an optimizer keeps of so many trained weights: of matrices its own, of the rest AdamW's."""
    traits, of_rest = optimizer_named(optimizer), optimizer_named("adamw").states
    if traits.takes_all:
        return traits.states * learned
    return traits.states * parameters["matrices"] + of_rest * (learned - parameters["matrices"])


def saved_bytes(parameters: Mapping[str, int], optimizer: str, learned: int) -> int:
    """Bytes of a checkpoint: float32 weights, as many as are trained, and the optimizer's states of them."""
    return FLOAT * (learned + num_states(parameters, optimizer, learned))


def layer_activations(shape: Shape, precision: Precision | str) -> int:
    """Bytes a token that one layer keeps for its backward pass, not compiled: what `before_attention`, the attention
    and `after_attention` of nanodag.model.layer save. A compiled layer keeps half to two thirds of it."""
    width, mlp, wide = shape.width, shape.mlp_width, width_of(precision)
    query, key = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    # Norms are computed in float32 and keep their input so.
    norms = 2 * (FLOAT + 2 * wide) * width + (FLOAT + wide) * (query + key)
    return norms + wide * (query + 2 * key) + wide * query + FLOAT * shape.num_heads + 4 * wide * mlp


def activations(shape: Shape, tokens: int, *, precision: Precision | str, checkpointing: bool = False) -> int:
    """Bytes that all layers keep of so many tokens at once. checkpointing: a layer keeps its input alone, and one layer
    at a time is computed again."""
    wide, layer = width_of(precision), layer_activations(shape, precision)
    if checkpointing:
        return tokens * (shape.depth * wide * shape.width + layer)
    return tokens * shape.depth * layer


def working(shape: Shape, tokens: int, precision: Precision | str) -> int:
    """Bytes that the backward pass of one layer works in beside what was kept: gradients of the MLP's four inner
    tensors and of the residual stream."""
    return tokens * width_of(precision) * (4 * shape.mlp_width + 4 * shape.width)


def head_memory(
    shape: Shape, vocabulary: int, tokens: int, *, precision: Precision | str, device: str, scored: bool = False
) -> int:
    """Bytes of the output head: a block of logits, its float32 copies, and the gradients of hidden states and matrix.
    scored: log-probabilities with entropies, as RL takes them, instead of a loss."""
    wide = width_of(precision)
    rows = min(tokens, max(1, HEAD_BLOCK_BYTES // (vocabulary * wide)))
    copies = (3 if scored else 1) if device == "cuda" else 0  # on a CPU in pieces that stay in its cache
    block = rows * vocabulary * (wide * (2 if scored else 1) + FLOAT * copies)
    gradient = vocabulary * shape.width * (2 * wide + (FLOAT if rows < tokens else 0))
    return block + gradient + 2 * tokens * shape.width * wide


def documents_apart(
    shape: Shape, tokens: int, *, precision: Precision | str, device: str, checkpointing: bool = False
) -> int:
    """Bytes, at most, of so many tokens where each document is attended to in a row of its own: filled-up copies of
    query, key, value and output, for all heads, that each layer keeps. Our own attention on a CPU (heads of a multiple
    of 16) and flash attention on a GPU need none."""
    is_free = precision != "fp32" and shape.head_width % 8 == 0 if device == "cuda" else shape.head_width % 16 == 0
    layers = 1 if checkpointing else shape.depth
    return 0 if is_free else tokens * layers * width_of(precision) * 2 * 4 * shape.num_heads * shape.head_width


def lora_parameters(shape: Shape, rank: int) -> int:
    """Parameters of adapters of a rank on every matrix of the layers."""
    query, key = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    sides = 2 * (shape.width + query) + 2 * (shape.width + key) + 3 * (shape.width + shape.mlp_width)
    return shape.depth * rank * sides


def embedded_buffers(shape: Shape, vocabulary: int, slots: int, context: int) -> int:
    """Bytes that the embedded sampler works in beside weights and cache: scores and weights of the attention, logits,
    activations of a step and of the prompts that are run together. All float32."""
    query, key = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    attention = slots * context * (2 * shape.num_heads + shape.num_kv_heads)
    step = slots * (3 * shape.width + query + 2 * key + 3 * shape.mlp_width + vocabulary)
    prompts = PREFILL_TOKENS * (4 * shape.width + 2 * (query + 2 * key) + 4 * shape.mlp_width)
    return FLOAT * (attention + step + prompts)
