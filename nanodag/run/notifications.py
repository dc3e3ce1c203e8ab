"""Telling somebody how a run ended: what is said, and a webhook that it is posted to."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from nanodag.errors import ConfigError, ServerBusy, ServerError

TIMEOUT_S = 20.0
MAX_TEXT = 3000
"""Characters: chat programs refuse, or cut, longer messages."""


def notice(*, flow: str, run: str, state: str, message: str, look: str) -> dict[str, str]:
    """Message about a flow run that ended badly. state: Prefect's name of how. message: a line for each stage that
    failed or score that got worse. look: the address of its page. `text` is what chat programs show."""
    text = f"nanodag {flow} {run}: {state}\n{message}"
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + " ..."
    night = flow == "nightly_eval"
    command = f"nanodag nightly show {run}" if night else f"nanodag status {run}"
    where = f"Look: {command}" + (f", or {look}" if look else "")
    return {"flow": flow, "run": run, "state": state, "message": message, "look": look, "text": f"{text}\n{where}"}


def post(webhook: str, body: Mapping[str, Any]) -> None:
    """POST a message as JSON. webhook: `env:NAME`.

    Raises ConfigError when its environment variable is not set, ServerError when the other side does not take it;
    ServerBusy, which is one, when it may take it later: it was not reached, or answered 429 or 5xx. The address is
    neither logged nor in a message: it is often a secret.
    """
    import httpx

    from nanodag.rewards.remote import may_pass

    name = webhook.removeprefix("env:")
    address = os.environ.get(name, "")
    if not address:
        raise ConfigError(
            f"notify.webhook is {webhook!r}, but {name} is not set where the flows are served. Set it and restart "
            "with: nanodag server stop; nanodag server start"
        )
    failure: Exception
    try:
        # It logs the whole address of every request.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        httpx.post(address, json=dict(body), timeout=TIMEOUT_S, follow_redirects=False).raise_for_status()
        return
    except httpx.HTTPStatusError as error:
        failure, reason = error, f"answered {error.response.status_code}: {error.response.text[:200]}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        failure, reason = error, f"cannot be reached ({type(error).__name__})."
    raise (ServerBusy if may_pass(failure) else ServerError)(f"notify.webhook: the address in {name} {reason}")
