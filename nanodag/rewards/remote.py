"""`remote:URL`: rewards from a server, several samples a request. docs/how-to/reward.md has the messages.

A connection that fails, 429 and 5xx are tried again for PATIENCE_S, after growing pauses or the server's Retry-After,
within the sample's time limit: a server may be begun anew meanwhile. Anything else fails the samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from tenacity import RetryCallState, retry, retry_if_exception, stop_after_delay, wait_random_exponential

from nanodag.registry import entry
from nanodag.rewards import time_limit
from nanodag.rewards.reward import Reward

PATIENCE_S = 30.0
MAX_PAUSE_S = 60.0
LAST_S = 1.0  # of the time limit: enough to say what went wrong, which is lost when the limit is reached
REQUEST_TIMEOUT_S = 60.0


@entry("reward", "remote", argument="url")
class Remote:
    """A client of one URL, kept as long as its process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client(timeout=REQUEST_TIMEOUT_S)

    def score_batch(self, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | str]:
        """The reward of each sample, or the reason why it has none. Raises httpx.HTTPError or ValueError for a request
        that failed as a whole."""
        body = {"samples": [{"prompt": dict(prompt), "completion": text} for prompt, text in samples]}
        reply = post_json(self._client, self._url, body)
        rewards = reply.get("rewards") if isinstance(reply, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(samples):
            raise ValueError(f"{self._url} answered {len(samples)} samples with {str(reply)[:120]!r}")
        return [_reward_of(reward) for reward in rewards]


def may_pass(error: BaseException) -> bool:
    """True when a request that failed so may succeed when it is sent again: the server was lost, or is busy."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def _pause_s(state: RetryCallState) -> float:
    """Seconds until the next try: the server's Retry-After, MAX_PAUSE_S at most; else growing ones."""
    error = state.outcome.exception() if state.outcome else None
    wanted = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    return min(float(wanted), MAX_PAUSE_S) if wanted.isdecimal() else wait_random_exponential(0.05, max=2.0)(state)


def _is_over(state: RetryCallState) -> bool:
    patience_s = state.kwargs.get("patience_s", PATIENCE_S)
    return stop_after_delay(patience_s)(state) or time_limit.left_s() < state.upcoming_sleep + LAST_S


@retry(retry=retry_if_exception(may_pass), wait=_pause_s, stop=_is_over, reraise=True)
def post_json(client: httpx.Client, url: str, body: Mapping[str, Any], *, patience_s: float = PATIENCE_S) -> Any:
    """POST a body; returns the server's answer. patience_s: how long what may pass is tried again. Raises
    httpx.HTTPError for a request that failed at last, ValueError for no JSON."""
    response = client.post(url, json=body)
    response.raise_for_status()
    return response.json()


def _reward_of(one: Any) -> Reward | str:
    try:
        if not isinstance(one, Mapping):
            return Reward(float(one))
        if "error" in one:
            return str(one["error"]) or "the server gave no reason"
        return Reward(float(one["value"]), {str(k): float(v) for k, v in one.get("components", {}).items()})
    except (KeyError, TypeError, ValueError) as error:
        return f"the server's reward {str(one)[:80]!r} is none: {error}"
