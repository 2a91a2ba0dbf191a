"""``arithmetic``: 1 when the last whole number of the completion equals the reference; else 0. For sums."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.rewards.calls import reference_column

_INTEGER = re.compile(r"(?<!\d)-?\d+")


def arithmetic(
    completions: Sequence[str], columns: Mapping[str, Sequence[Any]], *, gold: str = "answer"
) -> list[float | None]:
    """One value a sample; a row whose reference (column ``gold``) is None abstains."""
    wanted = reference_column("arithmetic", columns, gold)
    return [
        None if right is None else float(answer(completion) == answer(str(right)) is not None)
        for completion, right in zip(completions, wanted, strict=True)
    ]


def answer(completion: str) -> str | None:
    """The last whole number, without leading zeros. As text: int() refuses more than 4,300 digits."""
    found = _INTEGER.findall(completion)
    if not found:
        return None
    digits = found[-1].lstrip("-").lstrip("0") or "0"
    return "-" + digits if found[-1].startswith("-") and digits != "0" else digits
