"""What every part of the config shares: its base class, kinds of numbers, and fields that do not change a result."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# A constraint stands inside its branch: on the union it would be applied to "auto" too.
Auto = Literal["auto"]


Natural = Annotated[int, Field(ge=0)]


Positive = Annotated[int, Field(ge=1)]


Rate = Annotated[float, Field(gt=0)]


Share = Annotated[float, Field(ge=0, lt=1)]


Precision = Literal["fp32", "bf16"]


def later(default: Any, **constraints: Any) -> Any:
    """A field that came later: at its default it stays out of a stage's key, so that older artifacts are found."""
    return Field(default, json_schema_extra={"later": True}, **constraints)


def operational(default: Any, **constraints: Any) -> Any:
    """A field that does not change a stage's result."""
    return Field(default, json_schema_extra={"operational": True}, **constraints)


class Section(BaseModel):
    """Base of every part of the config: frozen, keyword only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
