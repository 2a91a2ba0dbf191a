"""Checks that a chat template shows all of a conversation.

Templates leave out messages, and print Python objects, without a word.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl.config import ConfigError
from jaxrl.data.tokenizer import Message

Render = Callable[[Sequence[Message]], str]
_REASONING = ("reasoning_content", "reasoning", "thinking")
_Path = tuple[str | int, ...]


class Shown:
    """Finds what a template does not show, once for every form of conversation: its roles and their parts."""

    def __init__(self) -> None:
        self._complete: set[tuple[_Path, ...]] = set()

    def lost(self, messages: Sequence[Message], render: Render) -> tuple[int, str] | None:
        """The first message with a text that does not change what ``render`` gives; None if every text does.

        With its number come words for the text, such as "message 0 of the role system".

        Marks take the place of the texts; a template that refuses marks is not tried. Of what a message
        reasons only the last one's counts, for templates may leave out that of earlier turns.
        """
        paths = list(_texts(messages))
        form = tuple((*path, str(messages[path[0]]["role"])) for path in paths)  # type: ignore[index]
        if form in self._complete:
            return None
        marks = [f"jjj{i}jjj" for i in range(len(paths))]
        try:
            found = render(_marked(messages, paths, marks))
            for i, mark in enumerate(marks):
                other = [*marks[:i], mark.replace("j", "q"), *marks[i + 1 :]]
                if mark not in found and render(_marked(messages, paths, other)) == found:
                    return int(paths[i][0]), _described(messages, paths[i])
        except ConfigError:
            return None
        self._complete.add(form)
        return None


def printed_object(messages: Any, text: str) -> Any:
    """The list or object within ``messages`` that ``text`` has as Python prints it, not as JSON; or None."""
    if isinstance(messages, dict | list):
        for part in messages.values() if isinstance(messages, dict) else messages:
            if (found := printed_object(part, text)) is not None:
                return found
        printed = str(messages)
        if printed in text and printed != json.dumps(messages, ensure_ascii=False):
            return messages
    return None


def _texts(messages: Sequence[Message]) -> Iterator[_Path]:
    """Where a conversation has text: contents, their parts, names of called functions, the last reasoning."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            yield i, "content"
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and str(part.get("text", "")).strip():
                yield i, "content", j, "text"
        for j, call in enumerate(message.get("tool_calls") or ()):
            if isinstance(call.get("function"), dict) and "name" in call["function"]:
                yield i, "tool_calls", j, "function", "name"
            elif "name" in call:
                yield i, "tool_calls", j, "name"
        if i == len(messages) - 1:
            yield from ((i, name) for name in _REASONING if message.get(name))


def _marked(messages: Sequence[Message], paths: Sequence[_Path], marks: Sequence[str]) -> list[Message]:
    marked: list[Any] = copy.deepcopy(list(messages))
    for (*way, last), mark in zip(paths, marks, strict=True):
        place: Any = marked
        for step in way:
            place = place[step]
        place[last] = mark
    return marked


def _described(messages: Sequence[Message], path: _Path) -> str:
    number, part = path[:2]
    message = messages[int(number)]
    alone = part == "content" and not message.get("tool_calls")
    return f"{'' if alone else f'the {part} of '}message {number} of the role {message['role']}"
