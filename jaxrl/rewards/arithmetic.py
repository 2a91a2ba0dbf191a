"""``arithmetic``: 1 when the last number of a completion is the reference, a whole number; else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.rewards.functions import reference_column

_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def arithmetic(
    completions: Sequence[str], columns: Mapping[str, Sequence[Any]], *, gold: str = "answer"
) -> list[float | None]:
    """One value a sample; a row whose reference (column ``gold``) holds no whole number abstains.

    Of a list of references any will do.
    """
    values: list[float | None] = []
    for completion, wanted in zip(completions, reference_column("arithmetic", columns, gold), strict=True):
        texts = [wanted] if isinstance(wanted, str) else wanted or []
        right = {answer(text) for text in texts} - {None}
        values.append(float(answer(completion) in right) if right else None)
    return values


def answer(completion: str) -> str | None:
    """The last number where it is whole (``-7``, ``1,234``, ``5.0``), without leading zeros. As text: int()
    refuses more than 4,300 digits."""
    found = _NUMBER.findall(completion)
    if not found:
        return None
    whole, _, decimals = found[-1].replace(",", "").partition(".")
    if decimals.strip("0"):
        return None
    digits = whole.lstrip("-").lstrip("0") or "0"
    return "-" + digits if whole.startswith("-") and digits != "0" else digits
