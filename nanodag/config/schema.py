"""JSON Schema of pipeline files, from their classes. Tables are partial, except in lists, which do not merge."""

import json
import re
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from nanodag import registry
from nanodag.config.kinds import find_kind, installed, shipped
from nanodag.config.pipeline import Pipeline
from nanodag.config.rl_parts import EntryConfig
from nanodag.config.section import sections_of

_OWN = {"type": "string", "pattern": ":"}  # package.module:function


class _AsWritten(GenerateJsonSchema):
    """Schemas with the names of functions, and the text that a file may have in the place of a table."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        table, model = super().model_schema(schema), schema["cls"]
        if issubclass(model, EntryConfig):
            names = {*registry.names(model.kind), model.special} - {""}
            table["properties"]["name"]["anyOf"] = [{"enum": sorted(names)}, _OWN]
        if any(check.info.mode == "before" for check in model.__pydantic_decorators__.model_validators.values()):
            return {"anyOf": [next(iter(table["properties"].values())), table]}  # the text is the first setting
        return table


def pipeline_schema() -> str:
    """The schema as sorted JSON. A stage whose kind is the user's own, `module:NAME`, may have any settings."""
    kinds = {name: find_kind(name) for name in (*shipped(), *installed())}
    pairs: list[Any] = [(model, "validation") for model in (Pipeline, *(kind.config for kind in kinds.values()))]
    references, whole = models_json_schema(pairs, schema_generator=_AsWritten)
    tables = whole["$defs"]
    for name in tables.keys() - set(re.findall(r'"items": \{"\$ref": "#/\$defs/(\w+)"', json.dumps(tables))):
        for table in (tables[name], *tables[name].get("anyOf", ())):
            table.pop("required", None)
    own = {model: tables.pop(of["$ref"].rpartition("/")[2]) for (model, _), of in references.items()}
    for name, kind in kinds.items():
        settings = own[kind.config]["properties"] | {"kind": {"const": name, "description": kind.config.__doc__}}
        settings["inputs"] |= {"type": ["object", "array"], "items": {"type": "string"}}
        for section, model in sections_of(kind.config).items():
            at = settings[section]["$ref"] + "/properties/"
            settings = {short: {"$ref": at + short} for short in model.model_fields} | settings
        tables[f"kind_{name}"] = own[kind.config] | {"properties": settings}
    stages: list[Any] = [{"const": "drop"}, *({"$ref": f"#/$defs/kind_{name}"} for name in kinds)]
    stages.append({"type": "object", "properties": {"kind": _OWN}, "required": ["kind"]})
    common = own[Pipeline]["properties"]
    del common["preset"], common["stages"]["minProperties"]
    common["stages"]["additionalProperties"] = {"anyOf": stages}
    extends = {"type": "string", "description": "The preset of this file that is the ground of this one."}
    default = {"type": "string", "description": "The preset that runs where none is named."}
    preset = own[Pipeline] | {"properties": common | {"extends": extends}}
    presets = {"type": "object", "additionalProperties": preset, "description": "Name -> pipeline."}
    file = preset | {"properties": common | {"default": default, "presets": presets}, "required": ["presets"]}
    return json.dumps(file | {"$defs": tables}, indent=1, sort_keys=True, ensure_ascii=False)
