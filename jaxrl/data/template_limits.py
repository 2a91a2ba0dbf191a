"""Limits of a chat template: how often it loops, how long it computes, how much it writes.

A template is code of whoever made the checkpoint. The sandbox that transformers renders it in bounds a single
range, not loops inside loops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import nodes, pass_context

MAX_TURNS = 2_000_000
"""Turns of all loops and calls of macros in one rendering."""
MAX_SECONDS = 5.0
"""Time of the rendering thread's own work."""
MAX_CHARACTERS = 100_000_000
_FILTER = "jaxrl_turn"


class TemplateLimit(Exception):
    """A template loops, computes or writes without end."""


def limit(chat_template: str) -> None:
    """Make transformers render ``chat_template`` within the limits.

    transformers keeps the compiled template, whose code is replaced by the same with a count in every loop
    and macro; so the limits need no thread and no signal. Whoever renders it meets ``TemplateLimit``.

    Raises: what jinja raises for a template that it cannot read.
    """
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(chat_template)
    environment = compiled.environment
    if _FILTER in environment.filters:
        return
    tree = environment.parse(chat_template)
    for node in list(tree.find_all((nodes.For, nodes.Macro))):
        node.body.insert(0, nodes.ExprStmt(_turn(node.lineno), lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_turn(node.lineno), node.test, lineno=node.lineno)
    environment.concat = _joined
    environment.filters[_FILTER] = _count
    counting = environment.from_string(tree.set_environment(environment))
    compiled.root_render_func, compiled.blocks = counting.root_render_func, counting.blocks


def _turn(line: int) -> nodes.Filter:
    return nodes.Filter(nodes.Const(True, lineno=line), _FILTER, [], [], None, None, lineno=line)


@pass_context
def _count(context: Any, value: bool) -> bool:
    """``value``, one turn later; the count is the rendering's own."""
    turns, start = getattr(context, "jaxrl_turns", (0, time.thread_time()))
    context.jaxrl_turns = turns + 1, start
    if turns >= MAX_TURNS:
        raise TemplateLimit(f"its loops make more than {MAX_TURNS:,} turns")
    if turns % 16 == 15 and time.thread_time() - start > MAX_SECONDS:
        raise TemplateLimit(f"it computes for more than {MAX_SECONDS:g} seconds")
    return value


def _joined(parts: Iterable[str]) -> str:
    return "".join(_bounded(parts))


def _bounded(parts: Iterable[str]) -> Iterator[str]:
    written = 0
    for part in parts:
        written += len(part)
        if written > MAX_CHARACTERS:
            raise TemplateLimit(f"it writes more than {MAX_CHARACTERS:,} characters")
        yield part
