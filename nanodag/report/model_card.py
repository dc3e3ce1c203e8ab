"""Model card of an artifact: its scores with intervals, what it was made from down to the data, how to run it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from nanodag.report.gather import columns_of
from nanodag.report.lineage import origin_of
from nanodag.report.page import environment_of
from nanodag.report.summary import scored_stages
from nanodag.report.tables import scores_table
from nanodag.store import Artifact, Store, canonical_json
from nanodag.store.run_record import RunRecord

UNKNOWN = "other"
LONGEST_HEAD = 1 << 16  # characters of a README.md in which its front matter must end


def card_of(store: Store, artifact: Artifact, name: str, record: RunRecord | None) -> str:
    """The README.md of a model that is published as owner/name. record: of the run whose evaluations are told.

    Its licence is what the model that it began at says of itself, else `other`: what data allow is the user's to say.
    """
    artifacts = origin_of(store, artifact)[1][::-1]
    imported = [str(made.config["model"]) for made in artifacts if made.kind == "import"]
    sources = {url: identity for made in artifacts for url, identity in (made.sources or {}).items()}
    urls = sorted(url for url, identity in sources.items() if _is_data(url, identity))
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["nanodag"]}
    head["license"] = next((_license(store, made) for made in artifacts if made.kind == "import"), UNKNOWN)
    if bases := [model.removeprefix("hub:").partition("@")[0] for model in imported if model.startswith("hub:")]:
        head["base_model"] = bases
    if sets := sorted({"/".join(url[4:].split("/")[:2]).partition(":")[0] for url in urls if url.startswith("hub:")}):
        head["datasets"] = sets
    columns = [] if record is None else columns_of(scored_stages(store, record))  # a key alone: of no run
    evaluated = [column for column in columns if column.stage.digest == artifact.digest]
    return (
        environment_of(autoescape=False)
        .get_template("model_card.md.jinja")
        .render(
            name=name,
            artifact=artifact,
            head=yaml.safe_dump(head, sort_keys=False),
            is_of_run=record is not None,
            rows=[row for column in evaluated for row in scores_table([column]).rows],
            artifacts=artifacts,
            data=[(_public(url), hashlib.sha256(canonical_json(sources[url]).encode()).hexdigest()) for url in urls],
        )
    )


def _is_data(url: str, identity: Any) -> bool:
    """True for a source of data; artifacts name models, servers and code among them, too."""
    kind = identity.get("kind") if isinstance(identity, Mapping) else None
    return ":" in url and not url.startswith("process:") and kind not in ("model", "server", "code", "form")


def _public(url: str) -> str:
    """A source without the folders of this machine, and without what signs one in."""
    if url.startswith(("file:", "/")):
        return f"file:{Path(url).name}"
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _license(store: Store, imported: Artifact) -> str:
    """The licence in the front matter of an imported model's README.md."""
    if "README.md" not in imported.files:
        return UNKNOWN
    with Path(store.materialize(imported), "README.md").open(encoding="utf-8", errors="replace") as stream:
        text = stream.read(LONGEST_HEAD)
    try:
        head = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    except (yaml.YAMLError, IndexError):
        return UNKNOWN
    license_ = head.get("license") if isinstance(head, Mapping) else None
    return license_ if isinstance(license_, str) else UNKNOWN  # of nested lists, text could be endless
