"""Number of times that a while loop of an HLO module runs, where its bounds are constants."""

from __future__ import annotations

import re

from jaxrl.compile.tpu.hlo import Instruction, Module

_PASSES = ("copy", "bitcast", "reshape", "convert")


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """Iterations of the while ``loop`` in ``computation``; None when they are known at run time only."""
    known = re.search(r'known_trip_count.{0,12}?"?n"?:\s*"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    condition = loop.attribute("condition")
    assert condition is not None
    bounds = _compared(module, condition)
    if bounds is None:
        return None
    direction, left, right = bounds
    start = left.value if left.element is None else _initial(module, computation, loop, left.element)
    limit = right.value if right.element is None else _initial(module, computation, loop, right.element)
    if limit is None or (start is None and direction not in ("LT", "LE", "NE")):
        return None
    start = start or 0
    step = 1 if left.element is None else _step(module, loop, left.element)
    counts = {
        "LT": -(-(limit - start) // step),
        "NE": -(-(limit - start) // step),
        "LE": (limit - start) // step + 1,
        "GT": start - limit,
        "GE": start - limit + 1,
    }
    return max(0, counts[direction]) if direction in counts else None


class _Side:
    """One side of the loop's comparison: a constant, or an element of the carry."""

    def __init__(self, value: int | None, element: int | None):
        self.value, self.element = value, element


def _compared(module: Module, condition: str) -> tuple[str, _Side, _Side] | None:
    """Direction and sides of the comparison that a loop's condition is."""
    root = module.root(condition)
    inner, outer = condition, None
    if root.op == "fusion":
        inner, outer = root.attribute("calls") or "", root
        root = module.root(inner)
    if root.op != "compare":
        return None
    sides = []
    for operand in root.operands:
        place, name = inner, operand
        if outer is not None:
            source = module.computations[inner][operand]
            while source.op in _PASSES:
                source = module.computations[inner][source.operands[0]]
            if source.op == "parameter":
                place, name = condition, outer.operands[int(source.literal)]
        sides.append(_resolve(module, place, name))
    return root.attribute("direction") or "", sides[0], sides[1]


def _resolve(module: Module, computation: str, name: str, depth: int = 0) -> _Side:
    """Origin of a scalar: a constant, or element k of the computation's parameter."""
    instruction = module.computations[computation].get(name)
    if instruction is None or depth > 30:
        return _Side(None, None)
    if instruction.op == "constant":
        return _Side(int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None, None)
    if instruction.op in _PASSES and instruction.operands:
        return _resolve(module, computation, instruction.operands[0], depth + 1)
    if instruction.op == "get-tuple-element":
        element = int(instruction.attribute("index") or 0)
        source = module.computations[computation].get(instruction.operands[0])
        if source is not None and source.op == "while":  # loop-invariant, one hopes: its initial value
            source = module.computations[computation].get(source.operands[0])
        if source is not None and source.op == "tuple" and element < len(source.operands):
            return _resolve(module, computation, source.operands[element], depth + 1)
        if source is not None and source.op == "parameter":
            return _Side(None, element)
    return _Side(None, None)


def _initial(module: Module, computation: str, loop: Instruction, element: int) -> int | None:
    """The constant that element ``element`` of the carry starts with."""
    carry = module.computations[computation].get(loop.operands[0])
    if carry is None or carry.op != "tuple":
        return None
    return _resolve(module, computation, carry.operands[element]).value


def _step(module: Module, loop: Instruction, element: int) -> int:
    """Number that the body adds to element ``element`` of the carry: windowed einsums count in twos."""
    body = loop.attribute("body") or ""
    root = module.root(body)
    if root.op != "tuple" or element >= len(root.operands):
        return 1
    instruction = module.computations[body].get(root.operands[element])
    while instruction is not None and instruction.op in _PASSES and instruction.operands:
        instruction = module.computations[body].get(instruction.operands[0])
    if instruction is None or instruction.op != "add":
        return 1
    added = [_resolve(module, body, operand).value for operand in instruction.operands]
    return next((a for a in added if a is not None and a > 0), 1)
