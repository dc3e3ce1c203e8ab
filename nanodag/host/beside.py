"""Tables that stand beside the module that reads them."""

from pathlib import Path
from typing import Any

import yaml


def table_beside(module: str, name: str = "") -> Any:
    """The value of a YAML file beside a module, of the module's name unless another is given. module: `__file__`."""
    path = Path(module)
    return yaml.safe_load((path.with_name(name) if name else path.with_suffix(".yaml")).read_text(encoding="utf-8"))
