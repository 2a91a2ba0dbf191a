"""Made-up sums such as "12+34=", with train and test splits that share no problem. Needs no download.

Columns: ``question`` ("12+34="), ``gold`` ("46", always right), ``answer`` (the same, except for the share
of ``label_noise``) and, with ``tool_use``, ``messages``: a conversation that asks a calculator first, or not.
A problem and its mirror image (12+34 and 34+12) are one couple, as are two doubles (7+7 and 92+92). Couples
are numbered, a keyed permutation puts the numbers in random order, and the last tenth of that order is the
test split: no sum of it is a trained one turned around. A second permutation mixes the problems of a split.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def load(
    split: str = "train",
    *,
    rows: int | None = None,
    digits: int = 2,
    operators: str = "+",
    label_noise: float = 0.0,
    tool_use: float | None = None,
    seed: int = 0,
) -> Arithmetic:
    """Rows of distinct problems ``a op b``.

    Args:
        split: train or test: for equal digits, operators and seed, neither shares a problem with the other,
            nor a mirror image of one.
        rows: number of rows; None: all of the split, at most 100,000.
        digits: most digits of an operand; operands start at 0.
        operators: which of + - * occur, for example "+-".
        label_noise: share of rows whose ``answer`` is wrong in one digit: a weak teacher for a supervised
            warm start.
        tool_use: share of rows whose ``messages`` call the environment ``calculator`` and answer with what it
            says; the others answer at once. None: there is no such column.
        seed: of order, split and noise; independent of the run's seed, so that a held-out split stays held
            out.
    """
    return Arithmetic(split, rows, digits, operators, label_noise, tool_use, seed)


def problems(
    split: str = "train",
    *,
    rows: int | None = None,
    digits: int = 2,
    operators: str = "+",
    label_noise: float = 0.0,
    tool_use: float | None = None,
    seed: int = 0,
) -> Iterable[tuple[str, str]]:
    """(argument, message) of what cannot work."""
    numbers: dict[str, tuple[object, object]] = {
        "rows": (rows, int),
        "digits": (digits, int),
        "seed": (seed, int),
    }
    wrong = [name for name, (value, kind) in numbers.items() if value is not None and type(value) is not kind]
    for name in wrong:
        yield name, f"{numbers[name][0]!r}: needs a whole number"
    if split not in ("train", "test"):
        yield "split", f"{split!r}: arithmetic has train and test"
    if not isinstance(label_noise, (int, float)) or not 0 <= label_noise <= 1:
        yield "label_noise", f"{label_noise!r}: needs a share between 0 and 1"
    if tool_use is not None and (not isinstance(tool_use, (int, float)) or not 0 <= tool_use <= 1):
        yield "tool_use", f"{tool_use!r}: needs a share between 0 and 1, or null"
    if not isinstance(operators, str) or not operators or not set(operators) <= set(OPERATORS):
        yield "operators", f"{operators!r}: needs one or more of {' '.join(OPERATORS)}"
        return
    if wrong:
        return
    if not 1 <= digits <= 9:
        yield "digits", f"{digits}: needs 1 to 9"
        return
    room = _split_size(split, digits, operators)
    if rows is not None and not 1 <= rows <= room:
        yield (
            "rows",
            f"{rows}: the {split} split with digits {digits} and operators {operators!r} has {room} problems",
        )


class Arithmetic:
    """Random access to the problems of one split."""

    def __init__(
        self,
        split: str,
        rows: int | None,
        digits: int,
        operators: str,
        label_noise: float,
        tool_use: float | None,
        seed: int,
    ):
        self.digits, self.label_noise, self.tool_use, self.seed = digits, label_noise, tool_use, seed
        self.operators = "".join(sorted(set(operators)))
        room = _split_size(split, digits, operators)
        self.size = min(room, 100_000) if rows is None else min(room, rows)
        self.room, self.first = room, 0 if split == "train" else _split_size("train", digits, operators) // 2

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        left, which, right = self._problem(index)
        symbol = self.operators[which]
        gold = str(OPERATORS[symbol](left, right))
        random = np.random.default_rng([self.seed, left, which, right])
        answer = _wrong(gold, random) if random.random() < self.label_noise else gold
        row: dict[str, Any] = {"question": f"{left}{symbol}{right}=", "answer": answer, "gold": gold}
        if self.tool_use is not None:
            said = [("user", row["question"]), ("assistant", answer)]
            if random.random() < self.tool_use:
                call = f"<tool>{left}{symbol}{right}</tool>"
                said = [said[0], ("assistant", call), ("tool", gold), ("assistant", gold)]
            row["messages"] = [{"role": role, "content": content} for role, content in said]
        return row

    def _problem(self, index: int) -> tuple[int, int, int]:
        """Left operand, number of the operator, right operand."""
        mixed = _permute(index, self.room, f"{self.seed},mixed")
        couple, second = divmod(mixed, 2)
        couple = _permute(self.first + couple, _couples(self.digits, self.operators), self.seed)
        cell, which = divmod(couple, len(self.operators))
        left, right = _pair(cell, second, 10**self.digits)
        return left, which, right


def _couples(digits: int, operators: str) -> int:
    return len(set(operators)) * 10 ** (2 * digits) // 2


def _split_size(split: str, digits: int, operators: str) -> int:
    couples = _couples(digits, operators)
    return 2 * (couples // 10 if split == "test" else couples - couples // 10)


def _pair(cell: int, second: int, numbers: int) -> tuple[int, int]:
    """The ``second`` (0 or 1) problem of a couple: cell 0 to numbers^2 / 2 - 1 of a grid of numbers / 2 rows.

    The triangle left < right, cut in the middle and its lower half turned around, fills all columns but the
    last, which has the doubles. ``numbers`` is even.
    """
    row, column = divmod(cell, numbers)
    if column == numbers - 1:
        double = numbers - 1 - row if second else row
        return double, double
    turned = column < row
    left, right = (numbers - 1 - row, numbers - 1 - column) if turned else (row, column + 1)
    return (right, left) if second else (left, right)


def _permute(index: int, size: int, seed: int | str) -> int:
    """Place of ``index`` in a random order of range(size).

    A Feistel network (Luby and Rackoff 1988) over the next power of four, walked until it lands inside, is a
    permutation that needs no table.
    """
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{seed},{turn},{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def _wrong(number: str, random: np.random.Generator) -> str:
    """``number`` with one other digit, of the same length and without a leading zero."""
    places = [i for i, character in enumerate(number) if character.isdigit()]
    place = places[random.integers(len(places))]
    leading = place == places[0] and (len(places) > 1 or number.startswith("-"))
    choices = [d for d in ("123456789" if leading else "0123456789") if d != number[place]]
    return number[:place] + choices[random.integers(len(choices))] + number[place + 1 :]
