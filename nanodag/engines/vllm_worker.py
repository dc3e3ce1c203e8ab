"""Methods that vLLM's workers have beside their own, by which tensors come to a whole model before vLLM loads them."""

from typing import Any

from nanodag.inference import weight_bodies as w
from nanodag.sampler.shared_tensors import opened
from nanodag.sampler.weight_group import WeightGroup, broadcast_of, join_group


class WeightReceiver:
    """Further methods of each of vLLM's workers. An answer is what went wrong, "" for nothing: an error that is raised
    in a worker comes without its reason. body: JSON, as vLLM's calls take nothing but plain values."""

    rank: int
    device: Any
    _group: WeightGroup | None = None
    _came: dict[str, Any]

    def nanodag_join(self, body: str) -> str:
        """Join a group whose rank 0 waits at the address, until all of its members are there."""
        try:
            self._group = join_group(w.InitGroupBody.model_validate_json(body), self.rank)
        except (RuntimeError, OSError) as error:
            return f"Failed to initialize custom process group: {error}."
        return ""

    def nanodag_leave(self) -> str:
        """Leave it."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        return ""

    def nanodag_receive(self, is_first: bool, handles: list[bytes], body: str) -> str:
        """Take one bucket, and keep it: of one's own handle, or of a broadcast where there are none. is_first: of what
        came before nothing is kept."""
        self._came = {} if is_first else self._came
        try:
            if handles:
                self._came |= opened(handles[self.rank], self.device)
            elif self._group is not None:
                self._came |= broadcast_of(self._group, w.ReceiveWeightsBody.model_validate_json(body))
        except (RuntimeError, IndexError) as error:
            return f"Failed to receive weights: {error}"
        return ""

    def nanodag_shapes(self) -> dict[str, list[int]]:
        """Shapes of what came, by name; of tensors with NaN or infinity none."""
        return {name: list(one.shape) if bool(one.isfinite().all()) else [] for name, one in self._came.items()}

    def nanodag_load(self) -> str:
        """Sample with all that came."""
        came, self._came = self._came, {}
        self.reload_weights(weights_iterator=iter(came.items()))  # type: ignore[attr-defined] # the worker's
        return ""
