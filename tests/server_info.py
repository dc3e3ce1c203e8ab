"""What a sampler says of what it is doing, at an endpoint that the stage itself does not ask."""

from typing import Any

import aiohttp

from nanodag.inference.client import SamplerClient


async def server_info(client: SamplerClient) -> dict[str, Any]:
    """The answer of `/get_server_info`."""
    headers = {"Authorization": f"Bearer {client.token}"} if client.token else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{client.url}/get_server_info") as found:
        return await found.json()
