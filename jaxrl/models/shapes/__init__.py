"""Shapes of well-known models, so that a run can be planned without their weights and without a connection.

One file a model: ``config``, the facts of its config.json; ``tokenizer_size``, the largest id of its
tokenizer + 1; ``models``, the hub names that share them, each with the ids that end a completion (its
generation config's and its tokenizer's). Training never reads them.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class KnownModel(NamedTuple):
    """Facts of a model that a plan needs."""

    config: dict[str, Any]
    """For ``ModelConfig.from_hf``."""
    tokenizer_size: int
    stop_ids: tuple[int, ...]


def known(name: str) -> KnownModel | None:
    """The model with the hub name ``name`` (owner/name); None when it is not among ``names()``."""
    return _models().get(name)


def names() -> list[str]:
    """Hub names of all models whose shapes are known."""
    return sorted(_models())


@cache
def _models() -> dict[str, KnownModel]:
    found = {}
    for file in resources.files(__name__).iterdir():
        if file.name.endswith(".json"):
            facts = json.loads(file.read_text(encoding="utf-8"))
            for name, stop_ids in facts["models"].items():
                found[name] = KnownModel(facts["config"], facts["tokenizer_size"], tuple(stop_ids))
    return found
