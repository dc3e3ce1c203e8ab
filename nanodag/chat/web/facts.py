"""Facts of a run's model for the chat page, whose facts.js works out of them how the model is to be asked."""

from typing import Any

from nanodag.data.adapters import adapter_name
from nanodag.store.run_record import RunRecord

SHARED = ("kind", "chat", "sample_prompts")


def facts_of(record: RunRecord, stage: str) -> dict[str, Any]:
    """The model's run and stage, and of each stage of the run: kind, inputs (stages), chat, sample_prompts, generate,
    and of each source of its data the adapter, and whether it writes calls of tools."""
    stages: dict[str, Any] = {}
    for name, config in record.pipeline.get("stages", {}).items():
        stages[name] = {field: config[field] for field in SHARED if field in config}
        stages[name]["inputs"] = list(record.stages[name].inputs.values())
        stages[name]["generate"] = config.get("rollout", {}).get("generate", {}).get("name", "one_turn")
        own = [source for source in config.get("data", ()) if not source["url"].startswith("input:")]
        names = (adapter_name(source["adapter"], source["url"], "conversation") for source in own)
        calls = (bool(source.get("options", {}).get("tools")) for source in own)
        stages[name]["data"] = [{"adapter": a, "tools": t} for a, t in zip(names, calls, strict=True)]
    return {"run": record.run, "stage": stage, "stages": stages}
