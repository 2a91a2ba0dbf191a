"""``format``: 1 when a completion has the form that was asked for; else 0. What it says does not matter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FINAL_LINE = r"^####[ \t]*\$?-?[\d,]*\.?\d+[^\n]*\s*\Z"


def format(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    tags: Sequence[str] | None = None,
    pattern: str | None = None,
) -> list[float]:
    """One value a sample; an empty completion has no form.

    Args:
        tags: names such as [think, answer]: the completion is ``<think>...</think>`` and then
            ``<answer>...</answer>``, each exactly once, none empty, with nothing but white space around them.
            An opening tag that ends the prompt already (chat templates of reasoning models do that) counts.
        pattern: a regular expression that is found somewhere; ``^`` and ``$`` match at line borders.
            With neither, the last line has to be ``#### `` and a number, the form of GSM8K.
    """
    if tags is not None:
        return [
            float(_has_tags(_opened(p, tags[0]) + c, tags)) for p, c in zip(prompts, completions, strict=True)
        ]
    wanted = re.compile(_FINAL_LINE if pattern is None else pattern, re.MULTILINE)
    return [
        float(bool(completion.strip()) and wanted.search(completion) is not None)
        for completion in completions
    ]


def problems(args: Mapping[str, Any]) -> Iterable[str]:
    tags, pattern = args.get("tags"), args.get("pattern")
    if tags is not None and pattern is not None:
        yield "tags and pattern exclude each other; expected one, or neither for a last line '#### number'"
    if tags is not None:
        names = tags if isinstance(tags, list | tuple) else [None]
        if not names or not all(isinstance(n, str) and re.fullmatch(r"[\w-]+", n) for n in names):
            yield f"tags {tags!r}; expected a list of names, such as [think, answer]"
        elif len(set(names)) < len(names):
            yield f"tags {tags!r}: each can occur only once"
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            yield f"pattern {pattern!r} is not a regular expression: {error}"


def needs(args: Mapping[str, Any], opening: str) -> Iterable[str]:
    """Texts without which no completion passes, after a prompt that ends with ``opening``; of a pattern they
    are not known."""
    tags = args.get("tags")
    if tags is not None:
        marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        return marks[1:] if _opened(opening, tags[0]) else marks
    return [] if args.get("pattern") is not None else ["####"]


def _opened(prompt: str, tag: str) -> str:
    return f"<{tag}>" if prompt.rstrip().endswith(f"<{tag}>") else ""


def _has_tags(text: str, tags: Sequence[str]) -> bool:
    for tag in tags:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return False
    rest = text
    for tag in tags:
        before, _, rest = rest.partition(f"<{tag}>")
        inside, closed, rest = rest.partition(f"</{tag}>")
        if before.strip() or not closed or not inside.strip():
            return False
        if any(f"<{other}>" in inside or f"</{other}>" in inside for other in tags):
            return False
    return not rest.strip()
