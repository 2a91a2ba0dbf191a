r"""Forms of answers that are no expressions: words, choices, lists and equations, taken apart.

A choice is ``B``, ``(B)`` or ``B. 12``. A list has commas, semicolons, "and" or "or" outside of brackets, or
a ``\pm``. An equation is a name, or nothing, and its values (``x = 2 + 3 = 5``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from jaxrl.rewards import units

_TEXT = re.compile(rf"{units.TEXT}([^{{}}]*)\}}")
_CHOICE = re.compile(
    r"(?P<word>(?:option|choice)\s+)?(?:\((?P<a>[A-Ha-h])\)[.:]?(?=\s|\\|$)|(?P<b>[A-H])(?:[.):](?=\s|\\)|$))\s*(?P<value>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OPERATOR = re.compile(r"[+*/^_=<>]|-\s|\\(?:cdot|times|div|pm|cup|cap|in|leq?|geq?)(?![a-zA-Z])")
_SEPARATOR = re.compile(
    r"[,;]|\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|\\l(?:or|and)(?![a-zA-Z])|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])"
)
_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_CONSTANTS = frozenset(
    "pi theta alpha beta gamma delta lambda omega phi sqrt frac sin cos tan cot sec csc log exp inf infinity "
    "arcsin arccos arctan sinh cosh tanh det gcd lcm max min mod".split()
)
_FUNCTIONS = r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|arg|det|dim|deg|gcd|max|min)(?![a-zA-Z])"
_MARKERS = re.compile(
    r"\\(?:angle|triangle|overline|overrightarrow|vec|hat|bar|widehat|left|right|lvert|rvert|mathcal|mathbb)(?![a-zA-Z])|[{}|\s$]"
)


def unwrapped(text: str) -> str:
    r"""The text without ``\text{...}`` and the like around parts of it."""
    return _TEXT.sub(r"\1", text)


def is_phrase(text: str) -> bool:
    """Return whether a text is words, not a product of its letters: ``listen``, ``no solution``, ``LRL``."""
    bare = unwrapped(text)
    if not re.fullmatch(r"[A-Za-z][A-Za-z\s'.-]*", bare):
        return False
    runs = re.findall("[A-Za-z]+", bare)
    return any(len(run) > 1 and _is_word(run, alone=True) for run in runs)


def words(text: str) -> Counter[str]:
    """The words within an expression, which no rule of algebra may rearrange."""
    text = re.sub(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", unwrapped(text))
    return Counter(run.lower() for run in re.findall("[A-Za-z]+", text) if _is_word(run, alone=False))


def _is_word(run: str, *, alone: bool) -> bool:
    if run.lower() in _CONSTANTS or re.fullmatch("[a-cx-z]+", run):
        return False
    if alone:
        return bool(re.search("[aeiouAEIOU]", run)) or run.isupper() or len(run) > 3
    return len(run) > 3 and bool(re.search("[aeiouAEIOU]", run))


class Choice(NamedTuple):
    label: str
    value: str


def choice(text: str) -> Choice | None:
    """The label of a choice and what stands behind it, or None."""
    match = _CHOICE.fullmatch(unwrapped(text).strip())
    if match is None or (match["b"] and not match["b"].isupper()) or _OPERATOR.match(match["value"]):
        return None
    if re.search(r"\([A-Ha-h]\)|\b[A-H][.)]\s", match["value"]):  # several
        return None
    return Choice((match["a"] or match["b"]).upper(), match["value"].strip())


def elements(text: str) -> list[str]:
    r"""The parts of a list, or the text itself when it is not a list; ``\pm 2`` are two."""
    found = []
    for part in _split(text, _SEPARATOR):
        signs = re.split(r"\\pm(?![a-zA-Z])|±", part)
        found += [f"{signs[0]}{sign}{signs[1]}" for sign in "+-"] if len(signs) == 2 else [part]
    return [part.strip().removeprefix("+").strip() for part in found if part.strip()]


def enclosed(text: str) -> tuple[str, list[str]] | None:
    r"""(brackets, parts) of a tuple, an interval or a set: ``(1, 2]``, ``\{1, 2\}``."""
    match = re.fullmatch(r"(\\\{|[(\[])(.*?)(\\\}|[)\]])", text.strip(), re.DOTALL)
    if match is None:
        return None
    depth = 0
    for c in match[2]:
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            return None
    return match[1] + match[3], [part.strip() for part in _split(match[2], re.compile("[,;]"))]


class Equation(NamedTuple):
    name: str
    values: list[str]


def equation(text: str) -> Equation | None:
    """A name ("" where there is none) and the values it is said to have; None for what has no equals sign."""
    parts = [part.strip() for part in _split(text, _EQUALS)]
    if len(parts) < 2 or not all(parts):
        return None
    if is_name(parts[0]):
        while len(parts) > 2 and is_name(parts[1]):
            del parts[1]
        return Equation(parts[0], parts[1:])
    if len(parts) == 2 and is_name(parts[1]):
        return Equation(parts[1], parts[:1])
    return Equation("", parts)


def is_name(text: str) -> bool:
    r"""Return whether a text just names a value: ``x``, ``f(2)``, ``\angle ABC``, ``speed``; not ``xy``."""
    text = unwrapped(text).strip()
    if re.fullmatch(r"\\frac\s*\{d\w*\}\s*\{d\w+\}|d\w/d\w", text):
        return True
    if match := re.fullmatch(r"(.*?[A-Za-z}'])\s*\(([^()]*)\)", text):
        if match[1] not in "fghpqFGHPQTE" and re.search(r"[+*/^-]", match[2]):
            return False  # a product: a(b + c)
        text = match[1]
    text = re.sub(r"_\s*(?:\{[^{}]*\}|\w)|'|\^\s*\{?\s*-1\s*\}?|\^\s*\\circ", "", text)
    text = re.sub(_FUNCTIONS, "", text)
    plain = _MARKERS.sub("", text)
    if re.fullmatch(r"\\?[A-Za-z]|\\[a-z]+|m?[A-Z]{1,4}", plain):
        return True
    return is_phrase(text)


def _split(text: str, separator: re.Pattern[str]) -> Iterable[str]:
    """The text between separators outside of brackets."""
    start, depth, at = 0, 0, 0
    for match in separator.finditer(text):
        for c in text[at : match.start()]:
            depth += (c in "([{") - (c in ")]}")
        at = match.start()
        if depth == 0:
            yield text[start : match.start()]
            start = match.end()
    yield text[start:]
