"""What the installed mlx-lm can load, seen from its files and not by importing it (an import takes seconds and MLX).

Every answer errs on the side of "yes": what cannot be found out here is left to mlx-lm itself.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

_ONE_NUMBER: Final = ("hidden_size", "num_hidden_layers", "vocab_size")
# Published configs have lists here (one value a layer), and zeros for parts that the model does not have.
_MAY_VARY: Final = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Architectures:
    """The model types of one installation of mlx-lm.

    Attributes:
        modules: names of the modules that hold the models.
        remapped: module by model type, for types that share another's module.
        remapped_by_architecture: module by model type and a name in `architectures`.
    """

    modules: frozenset[str]
    remapped: Mapping[str, str]
    remapped_by_architecture: Mapping[tuple[str, str], str]

    def support(self, config: Mapping[str, Any]) -> bool:
        """Whether there is a module for the model type of this config.json."""
        model_type = config["model_type"]
        named = config.get("architectures") or ()
        for architecture in (named,) if isinstance(named, str) else named if isinstance(named, list) else ():
            if isinstance(architecture, str) and (model_type, architecture) in self.remapped_by_architecture:
                return True
        return self.remapped.get(model_type, model_type) in self.modules


@lru_cache(maxsize=1)
def installed_architectures() -> Architectures | None:
    """What mlx-lm's files say; None when it is not installed or does not look as expected."""
    try:
        found = importlib.util.find_spec("mlx_lm")
    except (ImportError, ValueError):
        return None
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return architectures_in(Path(places[0])) if places else None


def architectures_in(package: Path) -> Architectures | None:
    """The architectures of the mlx-lm whose files lie in this folder; None when they do not look as expected."""
    try:
        tables = _tables(ast.parse((package / "utils.py").read_bytes()))
        modules = frozenset(entry.name.partition(".")[0] for entry in (package / "models").iterdir())
    except (OSError, ValueError, SyntaxError):
        return None
    remapped = tables.get("MODEL_REMAPPING")
    if remapped is None:
        return None  # this mlx-lm finds its models in another way
    return Architectures(modules, remapped, tables.get("MODEL_ARCHITECTURE_REMAPPING", {}))


def wrong_number(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The first field of config.json, or of its `text_config`, that must be a number and is none, with its value."""
    nested = config.get("text_config")
    for prefix, table in (("", config), ("text_config.", nested if isinstance(nested, dict) else {})):
        for key in (*_ONE_NUMBER, *_MAY_VARY):
            value = table.get(key)
            single = key in _ONE_NUMBER
            if value is None or (isinstance(value, list) and not single):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or (single and value <= 0):
                return prefix + key, value
    return None


def _tables(module: ast.Module) -> dict[str, dict[Any, str]]:
    """The literal dictionaries that the module assigns at its top, by name."""
    tables: dict[str, dict[Any, str]] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if isinstance(value, ast.Dict):
            try:
                literal = ast.literal_eval(value)
            except ValueError:
                continue
            tables |= {target.id: literal for target in targets if isinstance(target, ast.Name)}
    return tables
