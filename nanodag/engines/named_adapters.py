"""Client of an SGLang that holds a policy's adapters by name. No torch here."""

import uuid
from pathlib import Path

from nanodag.inference.client import SamplerClient
from nanodag.model.headers import ADAPTER_CONFIG


def name_of_adapters(version: str | int) -> str:
    """Name of the adapters that a server is started with."""
    return f"policy-{version}"


class NamedAdapters(SamplerClient):
    """A sampler whose requests bear the name of the adapters that were given last. A name is loaded once, and the
    adapters before are given up only when new ones are there: nothing may be in flight then."""

    _before: tuple[str, ...] = ()  # names that are still to be given up

    def begins_with(self, folder: Path, version: str | int) -> None:
        if (folder / ADAPTER_CONFIG).is_file():
            self.lora_path = name_of_adapters(version)

    async def update_weights_from_disk(self, path: str, version: str | int, *, flush_cache: bool = True) -> None:
        """Sample with the adapters, or the checkpoint, in a folder from now on."""
        if not (Path(path) / ADAPTER_CONFIG).is_file():
            return await super().update_weights_from_disk(path, version, flush_cache=flush_cache)
        name = f"{name_of_adapters(version)}-{uuid.uuid4().hex[:8]}"
        await self._call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        self._before, self.lora_path = (*self._before, *filter(None, [self.lora_path])), name
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body)
        while self._before:
            await self._call("POST", "/unload_lora_adapter", {"lora_name": self._before[0]})
            self._before = self._before[1:]
