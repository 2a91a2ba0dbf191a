"""Values of a Hugging Face config.json, with the defaults of its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.config import ConfigError
from jaxrl.models.families import FAMILIES

QUANTISED = ("quantization_config", "compression_config")
"""Keys that say how weights are quantised."""
_SAME_AS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""transformers 5 renames the one to the other."""


class Reader:
    """Looks keys up with the family's defaults and collects what is wrong, so that all of it is told at
    once."""

    def __init__(self, given: Mapping[str, Any], where: str):
        self.where = where
        self.found: list[tuple[str, str]] = []
        kind = given.get("model_type")
        if kind == "gemma3":  # the multimodal wrapper: only its text part is a decoder of ours
            text = given.get("text_config") or {}
            if not isinstance(text, Mapping):
                raise ConfigError(f"{where}: text_config is {text!r}; an object is needed", "text_config")
            outer = {key: given[key] for key in QUANTISED if given.get(key)}
            given = {"tie_word_embeddings": given.get("tie_word_embeddings", True), **text, **outer}
            kind = given.setdefault("model_type", "gemma3_text")
        elif kind in FAMILIES:
            architectures = given.get("architectures") or [FAMILIES[kind].architecture]
            stem = FAMILIES[kind].architecture.removesuffix("ForCausalLM")
            if architectures[0] not in (stem + "ForCausalLM", stem + "ForSequenceClassification"):
                self.problem(
                    "architectures",
                    f"{architectures[0]!r} disagrees with model_type {kind!r} ({stem}ForCausalLM)",
                )
        if kind not in FAMILIES:
            what = (
                f"architecture {given['architectures'][0]!r}" if given.get("architectures") else f"{kind!r}"
            )
            raise ConfigError(
                f"{where}: unknown {what} (model_type {kind!r}); known are {', '.join(sorted(FAMILIES))} and "
                "gemma3 (its text part)",
                "model_type",
            )
        self.kind: str = kind
        self.family = FAMILIES[kind]
        self.given = given

    def problem(self, key: str, message: str) -> None:
        self.found.append((key, f"{self.where}: {message}"))

    def raise_found(self) -> None:
        if self.found:
            raise ConfigError(list(dict.fromkeys(self.found)))

    def has(self, key: str) -> bool:
        return self.given.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value given, even if it is null; else the family's default."""
        if key not in self.given and _SAME_AS.get(key) in self.given:
            key = _SAME_AS[key]
        return self.given.get(key, self.family.defaults.get(key, default))

    def number(self, key: str, default: Any = None, kind: type = int) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            self.problem(key, f"{key} is missing; a positive number is needed")
            return kind(1)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value <= 0
            or kind(value) != value
        ):
            self.problem(
                key, f"{key} is {value!r}; a positive {'integer' if kind is int else 'number'} is needed"
            )
            return kind(1)
        return kind(value)

    def flag(self, key: str) -> bool:
        """A switch; words such as "no" and "false" are refused."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, f"{key} is {value!r}; true or false is needed")
        return value is True

    def optional(self, key: str) -> float | None:
        """A positive number, or None where it is off."""
        return None if self.get(key) is None else self.number(key, kind=float)
