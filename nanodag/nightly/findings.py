"""What a night comes to: scores, comparisons and the trend page, kept in the store and in the night's record."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanodag.config.cron import zone_of
from nanodag.errors import ConfigError, ServerBusy, ServerError
from nanodag.errors.words import counted
from nanodag.nightly.compare import compare
from nanodag.nightly.nights import Night, earlier_nights
from nanodag.nightly.scores import scores_of
from nanodag.run.composed import note_page, publish_page
from nanodag.run.record import StageResult

PAGE_STAGE = "trend"
WEBHOOK_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class NightFindings:
    """What a night found. worse: a line for each score that is worse by more than noise. page: trend.html; markdown:
    its tables."""

    night: str
    num_scores: int
    worse: tuple[str, ...]
    page: Path
    markdown: str

    def as_json(self) -> dict[str, Any]:
        """For an event or a webhook; `text` is what chat programs show."""
        text = "\n".join(
            [f"nanodag {self.night}: {len(self.worse)} of {counted(self.num_scores, 'score')} got worse", *self.worse]
        )
        return {"night": self.night, "num_scores": self.num_scores, "worse": list(self.worse), "text": text}


def conclude(night: Night, results: Mapping[str, StageResult]) -> NightFindings:
    """Compare a night with those before it and publish its page. results: of its eval stages that succeeded.

    A night concluded again, after a Retry, has its scores replaced and its page added as another attempt.
    """
    store, settings = night.run.store, night.settings.nightly
    scores = scores_of(night, results)
    earlier = earlier_nights(store, night.run.name, settings.compare_nights)
    comparisons = compare(store, scores, earlier, false_alarms=settings.false_alarms)
    record = store.change_run(
        night.run.name, lambda record: record.changed(nightly=record.night.changed(scores=tuple(scores)))
    )
    worse = tuple(str(comparison) for comparison in comparisons if comparison.is_worse)
    if not scores:  # every eval failed: there is nothing to draw
        return NightFindings(night=night.run.name, num_scores=0, worse=(), page=Path(), markdown="")

    from nanodag.nightly.trend import trend_report  # it draws; nothing else here needs what that takes
    from nanodag.report.page import to_html, to_markdown

    zone = zone_of(settings.timezone)
    report = trend_report([*earlier, record], comparisons, false_alarms=settings.false_alarms, zone=zone)
    markdown = to_markdown(report)
    payload = {
        "scores": [score.model_dump(mode="json") for score in scores],
        "comparisons": [comparison.as_json() for comparison in comparisons],
    }
    files = {"trend.html": to_html(report), "trend.md": markdown, "night.json": json.dumps(payload, indent=1)}
    metrics = {"num_scores": len(scores), "num_worse": len(worse)}
    artifact = publish_page(night.run, PAGE_STAGE, {"night": night.run.name}, results, files, metrics)
    note_page(night.run, PAGE_STAGE, artifact)
    page = store.materialize(artifact) / "trend.html"
    return NightFindings(night=night.run.name, num_scores=len(scores), worse=worse, page=page, markdown=markdown)


def post(webhook: str, body: Mapping[str, Any]) -> None:
    """POST a night's findings as JSON. webhook: as in the config, not `none`.

    Raises ConfigError when its environment variable is not set, ServerError when the other side does not take it;
    ServerBusy, which is one, when it may take it later: it was not reached, or answered 429 or 5xx.
    """
    import httpx

    address = webhook
    if webhook.startswith("env:"):
        name = webhook.removeprefix("env:")
        address = os.environ.get(name, "")
        if not address:
            raise ConfigError(
                f"nightly.webhook is {webhook!r}, but {name} is not set where the flows are served. Set it and restart "
                "with: nanodag server stop; nanodag server start"
            )
    where = address.partition("?")[0].rsplit("/", 1)[0]  # the rest of such an address is often a secret
    try:
        answer = httpx.post(address, json=dict(body), timeout=WEBHOOK_TIMEOUT_S, follow_redirects=False)
    except httpx.HTTPError as error:
        may_pass = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
        raise (ServerBusy if may_pass else ServerError)(
            f"nightly.webhook: {where}/... cannot be reached ({type(error).__name__}: {error})."
        ) from error
    if answer.status_code >= 300:
        may_pass = answer.status_code == 429 or answer.status_code >= 500
        raise (ServerBusy if may_pass else ServerError)(
            f"nightly.webhook: {where}/... answered {answer.status_code}: {answer.text[:200]}"
        )
