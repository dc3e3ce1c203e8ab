"""The controller's half of the weight sync by shared memory: the trainer's rank 0 shares one bucket after the other,
and each sampler of this machine copies it. On a CPU it lies in /dev/shm, on a GPU in that GPU's memory. No torch here.

What becomes of samplers that die or hang is as with a broadcast (nanodag.rl.fleet.broadcast_sync).
"""

from collections.abc import Sequence
from pathlib import Path

from nanodag.errors import SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.rl.fleet.broadcast_sync import DistributedSync, Replies, is_here
from nanodag.rl.fleet.replica import Member


class SharedSync(DistributedSync):
    """By handles of tensors in memory that both sides see."""

    def _how(self) -> str:
        return "shared"

    async def _give_all(
        self, members: Sequence[Member], folder: Path, version: int, *, fingerprint: bool
    ) -> tuple[Replies, str]:
        if elsewhere := [member.client.url for member in members if not is_here(member.client)]:
            raise SamplerError(
                f"weights.sync: ipc reaches samplers of this machine alone, and {elsewhere[0]} is on another one; "
                "use weights.sync: distributed"
            )
        await self._learn_buckets()
        self._now_given(folder, version)
        failure, replies = "", []
        for number in range(len(self._buckets)):
            # Every bucket is asked for: the ranks keep in step, and the fingerprints become whole.
            count = 0 if failure else len(members) * self._ranks_each
            replies = await self._ask("share", number=number, which="now", count=count, fingerprint=fingerprint)
            failure = failure or replies[0]["failure"]
            if not failure:
                handles = replies[0]["handles"]
                calls = [
                    self._take(member.client, handles[place :: len(members)], number, version)
                    for place, member in enumerate(members)
                ]
                failure = await self._settled(members, calls)
        return replies, failure

    async def _take(self, client: SamplerClient, handles: Sequence[str], number: int, version: int) -> None:
        """One sampler's copy of a bucket. handles: one for each of its ranks."""
        if number == 0:
            await client.begin_weight_update()
        is_last = number + 1 == len(self._buckets)
        await client.take_weights(handles, version=version if is_last else None, flush_cache=self._samplers.forgets)
