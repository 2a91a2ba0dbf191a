"""Kinds of training, each a dataclass of its settings with a method ``step``. ``algo.name`` chooses one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.config import ConfigError, Variants, import_by_path, nearest
from jaxrl.recipes.grpo import Grpo
from jaxrl.recipes.presets import PRESETS
from jaxrl.recipes.recipe import Recipe
from jaxrl.recipes.sft import Sft


def choose(given: Mapping[str, Any]) -> type[Recipe]:
    """The recipe that the name among the given keys of ``algo`` stands for.

    Raises:
        ConfigError: unknown name, or an import path of something else.
    """
    name = str(given.get("name", "grpo"))
    if name in PRESETS:
        return Grpo
    if name == "sft":
        return Sft
    names = (*PRESETS, "sft")
    if ":" not in name:
        hint = f"; did you mean {close!r}?" if (close := nearest(name, names)) else ""
        paths = "the import path of a dict of grpo's keys or of a Recipe"
        raise ConfigError(f"{name!r} given{hint}; expected one of {', '.join(names)}, or {paths}", "name")
    found = import_by_path(name, "name")
    if isinstance(found, Mapping):
        return Grpo
    if isinstance(found, type) and issubclass(found, Recipe):
        return found
    raise ConfigError(
        f"{name!r} is a {type(found).__name__}; expected a dict of grpo's keys, or a subclass of "
        "jaxrl.recipes.Recipe",
        "name",
    )


RECIPES = Variants(choose=choose, known={"grpo": Grpo, "sft": Sft})
