"""A causal model of any type that transformers has, behind the interface of our own decoder (nanodag.model.decoder).

Packed rows are taken apart: each sequence that none goes on from is a row of its own, behind those that it goes on
from, filled up at its end, which no causal layer sees. So windows, experts and state spaces are computed by
transformers as it computes one text alone. A prompt is read anew for each of its responses: this is slower than our
decoder. The logits never stand whole: hidden states go into the same head.

Nothing is random here: dropout is 0, and routers have no noise. No loss is added for the balance of experts.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanodag.errors import ConfigError
from nanodag.model.architecture import Architecture
from nanodag.model.attention import Packed, document_attention, length_classes, on_device
from nanodag.model.decoder import Decoder, Head, Want
from nanodag.model.expert_routing import ExpertRouting, routing_of
from nanodag.model.scorer import ScalarHead
from nanodag.model.transformers_class import LoadedClass, load_class

FILLED_UP = 1.25  # most that a row is longer than its tokens, but under ZeRO-3


class TransformersModel(nn.Module):
    """The model in a Hugging Face folder, in float32 on CPU, with the parameter names of transformers' class.

    Raises ConfigError as `load_class` does.
    """

    def __init__(self, folder: Path, architecture: Architecture, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.architecture = architecture
        loaded = load_class(folder)
        whole = loaded.whole
        for name, child in whole.named_children():
            self.add_module(name, child)
        self.lm_head = Head(loaded.head, loaded.cap)
        self._loaded: LoadedClass = loaded  # no child of this module: it holds the same ones
        self.routing: ExpertRouting | None = None  # until `replay_routes`
        names = whole._no_split_modules or ()
        layers = {type(module) for module in whole.modules() if type(module).__name__ in names}
        self.leaf_modules: tuple[type[nn.Module], ...] = tuple(sorted(layers, key=lambda layer: layer.__name__))
        if activation_checkpointing:
            whole.gradient_checkpointing_enable({"use_reentrant": False})
        self.train()

    def train(self, mode: bool = True) -> "TransformersModel":
        """Stay as it is: dropout and noise of routers are for training from nothing. Layers alone are told, which keep
        less for the backward pass then."""
        super().train(False)
        for module in self.modules():
            if getattr(module, "gradient_checkpointing", False) and isinstance(module, self.leaf_modules):
                module.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TransformersModel":
        """Move and cast as any module, but for the precision of buffers: angles of positions in bfloat16 are wrong."""
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in list(self.named_buffers()):
            if buffer.dtype != kept[name].dtype:
                owner, _, own = name.rpartition(".")
                self.get_submodule(owner)._buffers[own] = kept[name].to(buffer.device)
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        want: Want = "loss",
        temperature: float = 1.0,
        attend: Any = None,
        attend_last: Any = None,
        places: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As of our own decoder. Positions count from each sequence's begin, whatever position_ids says. routes: as of
        ExpertRouting.replayed, for each of input_ids."""
        if attend is None:
            assert document_ids is not None
            attend = document_attention(document_ids.cpu().numpy())
        assert isinstance(attend, Packed), "rows are shared out over ranks by our own decoder alone"
        # Under ZeRO-3 layers are called once a pass: all ranks gather together, and a gradient is shared out once.
        is_spread = hasattr(next(self.parameters()), "ds_id")
        classes, order = length_classes(attend.sequences, math.inf if is_spread else FILLED_UP)
        flat = input_ids.flatten()
        # Without gradients only a part of the rows is held at once: shared contexts make many of few tokens.
        limit = math.inf if is_spread or torch.is_grad_enabled() else flat.numel()
        rows = [
            self._hidden_of(flat, on_device(part, flat.device), routes)
            for in_rows in classes
            for part in np.array_split(in_rows, min(len(in_rows), math.ceil(in_rows.size / limit)) or 1)
        ]
        hidden = torch.cat(rows).index_select(0, on_device(order, flat.device))
        if attend_last is not None:
            assert places is not None
            return hidden[places][None]
        hidden = hidden.view(*input_ids.shape, -1)
        return hidden if want == "hidden" else self.lm_head(hidden, targets, want, temperature, places)

    def _hidden_of(self, flat: Tensor, part: Tensor, routes: Tensor | None) -> Tensor:
        """(R * T, W), of the tokens at the places (R, T)."""
        with nullcontext() if self.routing is None or routes is None else self.routing.replayed(routes[part.flatten()]):
            return self._loaded.hidden_of(input_ids=flat[part], use_cache=False).flatten(0, 1)

    def checkpoint(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of a checkpoint as transformers writes them, of whole parameters by name: experts apart, buffers."""
        from transformers.core_model_loading import revert_weight_conversion

        trained = {"lm_head.weight", *(name for name, _ in self.named_parameters())}
        kept = {name: tensor.to("cpu") for name, tensor in self.state_dict().items() if name not in trained}
        reverted: dict[str, Tensor] = revert_weight_conversion(self._loaded.whole, {**weights, **kept})
        return reverted


class TransformersScorer(ScalarHead, TransformersModel):  # type: ignore[misc] # its forward needs places
    """A reward model over transformers' layers.

    Raises ConfigError as a TransformersModel does, and where transformers has no class of the type that scores."""

    def __init__(self, folder: Path, architecture: Architecture, **options: Any) -> None:
        from transformers import AutoModelForSequenceClassification

        super().__init__(folder, architecture, **options)
        config = self._loaded.whole.config
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise ConfigError(f"{folder}: transformers has no class of type {config.model_type} with a scalar head.")
        width = self.lm_head.weight.shape[1]
        del self.lm_head
        self.put_head(width)

    def checkpoint(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As of a TransformersModel; the class that scores does not scale hidden states, as that with logits may."""
        layers = {name: tensor for name, tensor in weights.items() if name != "score.weight"}
        kept = {name: tensor for name, tensor in super().checkpoint(layers).items() if name != "score.weight"}
        return {**kept, "score.weight": weights["score.weight"] * self._loaded.scale}


def replay_routes(model: Decoder | TransformersModel) -> None:
    """Have a model take `routes` in forward. Raises ConfigError for one in which no routers of experts are known."""
    if not isinstance(model, TransformersModel) or (routing := routing_of(model._loaded.whole)) is None:
        raise ConfigError(
            f"rollout.router_replay is true, and a model of type {model.architecture.model_type} has no routers of "
            "experts that choose by top-k; leave it out."
        )
    model.routing = routing
    if model._loaded.whole.is_activation_checkpointing:  # what the backward pass computes again takes the same experts
        options: dict[str, Any] = {"context_fn": lambda: (nullcontext(), routing.replayed(routing.routes))}
        model._loaded.whole.gradient_checkpointing_enable({"use_reentrant": False, **options})
