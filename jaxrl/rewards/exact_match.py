"""``exact_match``: 1 when the completion is the reference, apart from white space around it; else 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.rewards.functions import reference_column


def exact_match(
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    gold: str = "answer",
    ignore_case: bool = False,
) -> list[float | None]:
    """One value a sample; a row whose reference (column ``gold``) is null, NaN or empty abstains.

    Of a list of references any will do.
    """
    values: list[float | None] = []
    for completion, wanted in zip(completions, reference_column("exact_match", columns, gold), strict=True):
        if wanted is None:
            values.append(None)
        else:
            right = [wanted] if isinstance(wanted, str) else wanted
            found = answer(completion, ignore_case)
            values.append(float(found in [answer(text, ignore_case) for text in right]))
    return values


def answer(completion: str, ignore_case: bool = False) -> str:
    """The text that is compared."""
    return completion.strip().casefold() if ignore_case else completion.strip()
