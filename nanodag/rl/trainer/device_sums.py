"""Numbers of micro-batches, added up where they were computed.

To read one is to wait for the device, and then the device waits for the host: a step reads once, at its end.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanodag.rl.rollouts.metrics import Sums


@dataclass(slots=True)
class DeviceSums:
    """As nanodag.rl.rollouts.metrics.Sums, of tensors () of any dtype on one device; they are added up in float64. Of a
    maximum over nothing, -inf, nothing is read."""

    summed: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: "DeviceSums") -> None:
        """Add another's numbers to these."""
        for name, value in other.summed.items():
            self.summed[name] = self.summed[name] + value.double() if name in self.summed else value.double()
        for name, value in other.largest.items():
            here = value.double()
            self.largest[name] = torch.maximum(self.largest[name], here) if name in self.largest else here

    def read(self) -> Sums:
        """The numbers, in one copy from the device."""
        tensors = [*self.summed.values(), *self.largest.values()]
        values = torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else []
        largest = zip(self.largest, values[len(self.summed) :], strict=True)
        return Sums(
            dict(zip(self.summed, values, strict=False)),
            {name: value for name, value in largest if value != float("-inf")},
        )
