"""Facts of a run's model by which it is talked to, on the page and in the terminal."""

from typing import Any

from nanodag.data.adapters import adapter_name
from nanodag.store.run_record import RunRecord

MAX_PROMPTS = 8
ONE_TURN = "one_turn"
NO_CHATS = ("tokenizer", "pretrain")  # kinds whose data are no conversations
# Adapters whose rows may have several turns, or parts that are calls; a user's own (`module:function`) may, too.
WITH_TURNS = {"messages", "smoltalk", "sharegpt", "preference"}
WITH_CALLS = {"messages"}


def facts_of(record: RunRecord, stage: str) -> dict[str, Any]:
    """Its run and stage, and prompts, the pipeline's own. has_turns, has_calls: False where nothing that it was trained
    on can have had several turns, or calls of tools; missing where nobody knows."""
    configs = record.pipeline.get("stages", {})
    lineage = [stage] if stage in configs else []
    for name in lineage:  # it grows; no circle
        lineage += [source for source in record.stages[name].inputs.values() if source in configs]
    evaluations = [name for name, config in configs.items() if config["kind"] == "eval"]
    evaluations.sort(key=lambda name: stage not in record.stages[name].inputs.values())  # its own come first
    chats = [configs[name] for name in lineage if configs[name]["kind"] not in NO_CHATS]
    tried = [*(configs[name] for name in evaluations if configs[name].get("chat") is not False), *chats]
    prompts = list(dict.fromkeys(prompt for config in tried for prompt in config.get("sample_prompts", ())))
    facts: dict[str, Any] = {"run": record.run, "stage": stage, "prompts": prompts[:MAX_PROMPTS]}
    if "pretrain" not in [configs[name]["kind"] for name in lineage]:  # its first weights are of elsewhere
        return facts
    data = [source for config in chats for source in config.get("data", ())]
    own = [source for source in data if not source["url"].startswith("input:")]
    adapters = {adapter_name(source["adapter"], source["url"], "conversation") for source in own}
    generates = {config.get("rollout", {}).get("generate", {}).get("name", ONE_TURN) for config in chats}
    is_open = any(":" in adapter for adapter in adapters) or not generates <= {ONE_TURN}
    has_tools = any(source.get("options", {}).get("tools") for source in own)
    has_turns, has_calls = is_open or bool(adapters & WITH_TURNS), is_open or has_tools or bool(adapters & WITH_CALLS)
    return facts | {"has_turns": has_turns, "has_calls": has_calls}
