"""What pipeline.yaml may say about who hears of a run that ended badly."""

import re

from pydantic import field_validator

from nanodag.config.section import Section

_WEBHOOK = re.compile(r"none|env:\w+|block:[a-z0-9-]+/[a-z0-9-]+")


class NotifyConfig(Section):
    """Who hears of a run, sweep or night that failed, and of a night that got worse."""

    webhook: str = "none"
    """Where a message goes: `env:NAME` for an address in an environment variable, `block:TYPE/NAME` for a notification
    block of Prefect's such as `block:slack-webhook/team`, or `none`."""

    @field_validator("webhook")
    @classmethod
    def _is_no_secret(cls, webhook: str) -> str:
        if _WEBHOOK.fullmatch(webhook):
            return webhook
        if "://" in webhook:  # not shown
            raise ValueError(
                "an address is often a secret, and what stands here is kept in the records of runs: set it in an "
                "environment variable and write env:NAME"
            )
        raise ValueError(f"{webhook!r} is neither none, env:NAME nor block:TYPE/NAME")
