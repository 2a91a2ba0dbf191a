"""Rope settings of a config.json, wherever transformers 4 or 5 reads them.

The base and the scaling may stand at the top (``rope_theta``), in ``rope_scaling`` or in ``rope_parameters``,
for all layers or by layer type. Two places may say the same; where they disagree the config is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.config import nearest
from jaxrl.models.reader import Reader
from jaxrl.models.rope import RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
_LENGTH = "original_max_position_embeddings"
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}
"""Keys that each type of rope reads besides its base."""
_SHARED = ("rope_type", "rope_theta", "partial_rotary_factor")


def read_rope(r: Reader, layer_type: str) -> RopeConfig:
    """Rope of the layers of one type. Gemma 3 has another base, and no scaling, on its sliding layers."""
    theta_key = "rope_local_base_freq" if _is_local(r, layer_type) else "rope_theta"
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for place, found in _places(r, layer_type, theta_key):
        for key, value in found.items():
            if key not in values:
                values[key], origins[key] = value, place
            elif values[key] != value:
                name = theta_key if key == "rope_theta" else place
                first = f"{key} {values[key]!r} ({origins[key]})"
                r.problem(name, f"{first} disagrees with {value!r} ({place})")
    if "rope_theta" not in values and theta_key not in r.given:
        values["rope_theta"] = r.family.defaults[theta_key]
    theta = values.get("rope_theta", "missing")
    if not _positive(theta):
        r.problem(theta_key, f"{theta_key} is {theta!r}; a positive number is needed")
        theta = 1.0
    if values.get("partial_rotary_factor", 1) != 1:
        r.problem(
            origins["partial_rotary_factor"],
            f"partial_rotary_factor {values['partial_rotary_factor']!r} is not supported; it has to be 1",
        )
    return _scaled(r, float(theta), values, next((p for k, p in origins.items() if k != "rope_theta"), ""))


def write_rope(rope: RopeConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a config.json; None for plain rope."""
    if rope.scaling == "default":
        return None
    out: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        out |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            _LENGTH: rope.original_max_positions,
        }
    return out


def _is_local(r: Reader, layer_type: str) -> bool:
    return r.kind == "gemma3_text" and layer_type == "sliding_attention"


def _places(r: Reader, layer_type: str, theta_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, its settings for layers of this type), nulls left out."""
    if r.has(theta_key):
        yield theta_key, {"rope_theta": r.given[theta_key]}
    for place in ("rope_scaling", "rope_parameters"):
        value = r.given.get(place)
        if not value:
            continue
        if not isinstance(value, Mapping):
            r.problem(place, f"{place} is {value!r}; an object is needed")
        elif any(isinstance(item, Mapping) or key in LAYER_TYPES for key, item in value.items()):
            yield from _nested(r, layer_type, place, value)
        elif r.kind != "gemma3_text":
            yield place, _cleaned(r, place, value)
        elif place == "rope_parameters":
            r.problem(place, f"{place} of {r.kind} needs an entry for each of {', '.join(LAYER_TYPES)}")
        elif not _is_local(r, layer_type):
            yield place, _cleaned(r, place, value)


def _nested(
    r: Reader, layer_type: str, place: str, value: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, item in value.items():
        if key == "rope_theta" and not _is_local(r, layer_type):
            yield f"{place}.{key}", {key: item}
        elif key not in LAYER_TYPES and key != "rope_theta":
            r.problem(place, f"unknown key {key!r} beside entries by layer type ({', '.join(LAYER_TYPES)})")
    own = value.get(layer_type)
    if isinstance(own, Mapping):
        yield f"{place}.{layer_type}", _cleaned(r, place, own)
    elif own is not None or r.kind != "gemma3_text":  # Gemma 3 has a base for each type without it
        r.problem(place, f"{place}.{layer_type} is {own!r}; an object is needed")


def _cleaned(r: Reader, place: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are given, with the type under its new name."""
    found = {key: item for key, item in value.items() if item is not None}
    old = found.pop("type", None)
    if old is not None and found.setdefault("rope_type", old) != old:
        r.problem(place, f"{place}: type {old!r} disagrees with rope_type ({found['rope_type']!r})")
    kind = found.get("rope_type", "default")
    known = (*_SHARED, *_NEEDED.get(str(kind), found))
    for key in [key for key in found if key not in known]:
        close = nearest(str(key), [*_SHARED, *_NEEDED["llama3"]])
        hint = f"; did you mean {close}?" if close and close != key else ""
        if "rope_type" not in found:
            hint = f"; rope_type is missing, one of {', '.join(_NEEDED)}"
        r.problem(place, f"{place} has {key!r}, which rope type {kind!r} does not use{hint}")
    return found


def _scaled(r: Reader, theta: float, values: Mapping[str, Any], place: str) -> RopeConfig:
    plain = RopeConfig(theta=theta)
    kind = values.get("rope_type", "default")
    if kind not in _NEEDED:
        r.problem(place, f"unknown rope type {kind!r}; known are {', '.join(_NEEDED)}")
        return plain
    if kind == "default":
        return plain
    top = r.given.get(_LENGTH)
    if kind == "llama3" and top is not None and values.get(_LENGTH, top) != top:
        r.problem(_LENGTH, f"{_LENGTH} {top!r} disagrees with {values[_LENGTH]!r} ({place})")
    wrong = [key for key in _NEEDED[kind] if not _positive(values.get(key))]
    if wrong:
        given = ", ".join(f"{key} {values.get(key)!r}" for key in wrong)
        r.problem(place, f"rope type {kind!r} needs positive numbers, got {given}")
        return plain
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=float(values["factor"]))
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    if high <= low:
        r.problem(place, f"high_freq_factor {high} must be greater than low_freq_factor {low}")
        return plain
    return RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=float(values["factor"]),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=int(values[_LENGTH]),
    )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
