"""``length``: rewards completions for their number of tokens, as sampled (a stop token counts)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def length(
    token_ids: Sequence[Sequence[int]],
    *,
    target: int | None = None,
    start: int | None = None,
    limit: int | None = None,
) -> list[float]:
    """One value a sample, by one of two curves.

    Args:
        target: 1 at this many tokens, falling linearly to 0 at none and at twice as many.
        start, limit: 0 up to ``start`` tokens, falling linearly to -1 at ``limit``, and -1 beyond.
    """
    counts = [len(ids) for ids in token_ids]
    if target is not None:
        return [max(0.0, 1.0 - abs(count - target) / target) for count in counts]
    assert start is not None and limit is not None  # see problems
    return [-min(1.0, max(0.0, (count - start) / (limit - start))) for count in counts]


def problems(args: Mapping[str, Any]) -> Iterable[str]:
    target, start, limit = (args.get(name) for name in ("target", "start", "limit"))
    if (target is None) == (start is None and limit is None) or (start is None) != (limit is None):
        yield "expected either target, or start and limit (tokens)"
        return
    if any(n is not None and (not isinstance(n, int) or isinstance(n, bool)) for n in (target, start, limit)):
        yield f"{dict(args)}: expected whole numbers of tokens"
    elif target is not None and target < 1:
        yield f"target {target}; must be at least 1 token"
    elif start is not None and limit is not None and not 0 <= start < limit:
        yield f"start {start}, limit {limit}; must be 0 <= start < limit"
