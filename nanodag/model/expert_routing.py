"""Experts that the routers of a mixture choose, in a class of transformers: recorded, or replayed from a record.

Letters: N tokens, L layers of the model with or without experts, K experts of a token.

A router's last call of torch.topk is its choice. A replay puts recorded indices there, with the router's own scores at
them. All else is the class's own: the weights that it makes of scores, and the gradients that reach it through them.

Source: Rollout Routing Replay, arXiv:2510.11370.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanodag.errors import ConfigError

TOP_K = (torch.topk, Tensor.topk)
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ExpertRouting(TorchFunctionMode):
    """Routers of one model by layer. Their forward is wrapped for good, and this is a mode of torch within it alone."""

    def __init__(self, num_layers: int, routers: Mapping[int, Any], num_experts: int, top_k: int) -> None:
        super().__init__()
        self._num_layers, self._num_experts, self._top_k = num_layers, num_experts, top_k
        self._layer, self._chosen = 0, dict[int, Tensor]()
        self.routes: Tensor | None = None
        for layer, router in routers.items():
            router.forward = partial(self._forward, layer, router.forward)

    def _forward(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._layer = layer
        with self:
            return forward(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # DeepSeek's routers choose groups before, by scores of another shape.
        if func not in TOP_K or args[0].shape[1:] != (self._num_experts,) or result.indices.shape[1] != self._top_k:
            return result
        indices = result.indices
        if self.routes is not None:
            recorded = self.routes.view(len(indices), self._num_layers, self._top_k)[:, self._layer].to(indices.dtype)
            indices = torch.where(recorded < 0, indices, recorded)
        self._chosen[self._layer] = indices
        return torch.return_types.topk((args[0].gather(-1, indices), indices))

    @contextmanager
    def replayed(self, routes: Tensor | None) -> Iterator[None]:
        """Have routers take these experts: (N, L * K) integers, -1 where a router chooses by itself; None: everywhere.
        Raises ConfigError for another L * K."""
        if routes is not None and routes.shape[1:] != (self._num_layers * self._top_k,):
            raise ConfigError(
                f"Rollouts have {routes.shape[1:].numel()} routed experts a token, and the model {self._top_k} in each "
                f"of {self._num_layers} layers. Train on rollouts of this model, or leave router_replay out."
            )
        if routes is not None and (most := int(routes.max())) >= self._num_experts:
            raise ConfigError(
                f"Rollouts name expert {most}, and the model has {self._num_experts} in a layer, the first of them 0. "
                "Train on rollouts of this model, or leave router_replay out."
            )
        before, self.routes = self.routes, routes
        try:
            yield
        finally:
            self.routes = before

    def chosen(self) -> Tensor:
        """(N, L, K) int32 on the CPU, of the last pass. A layer without experts has 0, as in SGLang."""
        none = torch.zeros_like(self._chosen[self._layer])
        return torch.stack([self._chosen.get(layer, none) for layer in range(self._num_layers)], 1).int().cpu()


@torch.no_grad()
def routing_of(whole: Any) -> ExpertRouting | None:
    """Routing of a model in its class of transformers. None without experts, or where routers choose in a way that is
    not known here."""
    recorder = (getattr(whole, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", ())
    found = {name: module for name, module in whole.named_modules() if isinstance(module, kind)}
    routers = {int(match[1]): router for name, router in found.items() if (match := _LAYER.search(name))}
    sizes: set[Any] = {(getattr(one, "num_experts", None), getattr(one, "top_k", None)) for one in found.values()}
    if len(routers) != len(found) or len(sizes) != 1 or None in (size := sizes.pop()):
        return None
    routing = ExpertRouting(whole.config.get_text_config().num_hidden_layers, routers, *size)
    whole(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=whole.device), use_cache=False)
    if routing._chosen.keys() == routers.keys():
        return routing
    for router in routers.values():  # or whoever asks again would wrap them once more
        del router.forward
    return None
