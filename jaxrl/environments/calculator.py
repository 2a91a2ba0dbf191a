"""``calculator``: the policy may ask for a calculation before it answers; 1 for the right answer, else 0.

A call is ``<tool>3*7</tool>``, or as Hermes and Qwen models write it:
``<tool_call>{"name": "calculator", "arguments": {"expression": "3*7"}}</tool_call>``. Each is answered with a
message of the tool. A turn without a call is the answer and ends the episode.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from jaxrl.data import columns
from jaxrl.environments.calls import Message, Step
from jaxrl.rewards.arithmetic import answer

_CALL = re.compile(r"<(tool|tool_call)>(.*?)(</\1>|$)", re.DOTALL)
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LONGEST_EXPRESSION = 200
_LARGEST_BITS = 512


class Environment:
    """A calculator beside a question with one right answer.

    Args:
        gold: column with the right answer.
    """

    def __init__(self, *, gold: str = "gold"):
        self.gold = gold

    def reset(self, example: Mapping[str, Any]) -> Any:
        key = "environment.args.gold"
        found = columns.value(example, self.gold, key)
        nothing = found is None or found != found  # NaN
        right = None if nothing else answer(columns.text(found, self.gold, key))
        if right is None:
            raise ValueError(f"column {self.gold!r} holds {found!r}; expected a whole number")
        return right

    def step(self, messages: list[Message], state: Any) -> Step:
        text = messages[-1]["content"]
        results = [calculate(call) for call in calls_in(text)]
        if not results:
            right = answer(text) == state
            return Step(reward=float(right), done=True)
        errors = sum(result.startswith("error") for result in results)
        return Step(
            observation=[{"role": "tool", "content": result} for result in results],
            state=state,
            metrics={"tool_calls": len(results), "tool_errors": errors},
        )


def calls_in(text: str) -> list[str]:
    """The expressions that ``text`` asks for; a call that cannot be read, or does not end, gives ""."""
    found = []
    for tag, inside, end in (match.groups() for match in _CALL.finditer(text)):
        if tag == "tool_call":
            try:
                inside = str(json.loads(inside)["arguments"]["expression"])
            except (ValueError, TypeError, KeyError):
                inside = ""
        found.append(inside.strip() if end else "")
    return found


def calculate(expression: str) -> str:
    """The value of numbers joined by + - * / // % ** and brackets, exactly: a whole number, or a decimal of
    10 digits. "error: ..." for anything else, and where the numbers grow out of bounds."""
    try:
        if not 0 < len(expression) <= _LONGEST_EXPRESSION:
            raise ValueError(f"needs an expression of 1 to {_LONGEST_EXPRESSION} characters")
        value = _value(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error.msg if isinstance(error, SyntaxError) else error}"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (
            right.denominator != 1 or abs(right) * _bits(left) > _LARGEST_BITS
        ):
            raise ValueError("the power is out of bounds")
        value = Fraction(_OPERATORS[type(node.op)](left, right))
    else:
        raise ValueError("only numbers, brackets and + - * / // % ** can be calculated")
    if _bits(value) > _LARGEST_BITS:
        raise ValueError("the number is out of bounds")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
