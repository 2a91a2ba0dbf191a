"""``math_answer``: 1 when the final answer of a completion equals the reference, mathematically; else 0.

``final_answer.py`` says where the answer stands. Plain numbers are compared exactly (``numerals.py``), dates
and times as such, words as text, lists part by part, everything else by math-verify, through its LaTeX
parser: no text is evaluated as Python (the parser's number tokens, nothing but digits, go through sympy's
reader).

What only one side states is ignored: a unit, a base, the label of a choice or its value, a name (``x = 5``).
What both state has to agree.

Limits, all of which judge a right answer wrong:

- Units are compared, not converted: ``1 km`` is not ``1000 m``, and ``$18`` is not ``$18 per day``.
- Numbers in words (``five``), decimal commas and synonyms (``DNE``, ``no solution``) are not read.
- ``100,200`` is one number, ``100, 200`` are two.
- Capital letters side by side are a word: ``AB`` is not ``BA``.
- Two ratios that look like times of day are times: ``10:20`` is not ``5:10``.

And two that may judge a wrong answer right: single letters are compared without regard to case, and numbers
within inequalities to 15 decimals.

Expressions that could take long (towers of powers, huge factorials, deep nesting, sums and integrals, long
texts) are compared as text. The time limits of math-verify need the main thread, so they are off; the limit
of reward workers stands behind the rest.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.rewards import answer_forms, dates, numerals, units
from jaxrl.rewards.final_answer import FALLBACKS, extract, unmarked
from jaxrl.rewards.functions import reference_column

_LETTER = re.compile(rf"{units.TEXT}\s*([a-zA-Z])\s*\}}")
_MAX_CHARACTERS = 400
_MAX_DEPTH = 16
_MAX_POWER = 10_000
_MAX_POWER_DIGITS = 100_000
_MAX_FACTORIAL = 1_000

_MAX_PARTS = 8
_MAX_UNLIKE_PARTS = 4
_EXACT_DIGITS = 30
_FLOAT_TOLERANCE = 1e-5


def math_answer(
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    gold: str = "answer",
    fallback: str = "phrase",
) -> list[float | None]:
    """One value a sample.

    Args:
        gold: the column with the reference: an answer, or a solution that ends in one (``#### 42``,
            ``\\boxed{42}``), or a list of answers any of which will do. A row without one (None) abstains.
        fallback: what counts without box, tag or ####. phrase: what follows "answer is"; last_number: that,
            else the last number of the text; none: nothing.
    """
    golds = reference_column("math_answer", columns, gold)
    return [_score(c, g, fallback) for c, g in zip(completions, golds, strict=True)]


def answer(completion: str, fallback: str = "phrase") -> str | None:
    """The final answer in a normal form: equal numbers and equal choices give equal strings."""
    text = extract(completion, fallback)
    if text is None or len(text) > numerals.MAX_DIGITS:
        return text
    text = _clean(text)
    if choice := answer_forms.choice(text):
        return choice.label
    equation = answer_forms.equation(text)
    if equation and equation.name and len(equation.values) == 1:
        text = _clean(equation.values[0])
    number = numerals.read(text)
    return number.canonical() if number else _normal(text) or None


def problems(args: Mapping[str, Any]) -> Iterable[str]:
    if args.get("fallback", "phrase") not in FALLBACKS:
        yield f"fallback {args['fallback']!r}; expected one of {list(FALLBACKS)}"
    if not isinstance(args.get("gold", ""), str):
        yield f"gold {args['gold']!r}; expected the name of a column"


def prepare() -> None:
    """Import math-verify and let its parser build its tables (seconds)."""
    matches(r"(x+1)^2", r"x^2+2x+1")


def matches(gold: str, found: str) -> bool:
    """Return whether two bare answers (LaTeX or plain) are equal."""
    if max(len(gold), len(found)) > numerals.MAX_DIGITS:
        return gold.strip() == found.strip()
    return _same(_clean(gold), _clean(found))


def _same(gold: str, found: str) -> bool:
    """``matches`` of clean texts. Each form decides, or leaves it to the next one."""
    if not gold or not found:
        return False
    if _normal(gold) == _normal(found):
        return True
    a, b = numerals.read(gold), numerals.read(found)
    if a and b:
        return numerals.equal(a, b)
    if any(len(text) > _MAX_CHARACTERS or _depth(text) > _MAX_DEPTH for text in (gold, found)):
        return False
    for form in (_same_date, _same_base, _same_choice, _same_equation, _same_list, _same_words, _same_unit):
        if (decided := form(gold, found)) is not None:
            return decided
    if re.search(r"\d \d", gold + "|" + found):  # LaTeX would read "3 4" as 34
        return False
    gold, found = (n.latex() if n and not (n.percent or n.long) else s for n, s in ((a, gold), (b, found)))
    if _may_take_long(gold) or _may_take_long(found):
        return False
    return _verifier()(gold, found)


def _same_date(gold: str, found: str) -> bool | None:
    return dates.equal(answer_forms.unwrapped(gold), answer_forms.unwrapped(found))


def _same_base(gold: str, found: str) -> bool | None:
    a, b = numerals.read_based(gold), numerals.read_based(found)
    if a or b:
        return numerals.equal_based(a, b, found if a else gold)
    # math-verify would drop what stands under a digit.
    return False if re.search(r"\d\)?\s*_", gold + "|" + found) else None


def _same_choice(gold: str, found: str) -> bool | None:
    a, b = answer_forms.choice(gold), answer_forms.choice(found)
    if a and b:
        return a.label == b.label and (not a.value or not b.value or matches(a.value, b.value))
    if a and a.value:
        return matches(a.value, found)
    return matches(gold, b.value) if b and b.value else None


def _same_equation(gold: str, found: str) -> bool | None:
    a, b = answer_forms.equation(gold), answer_forms.equation(found)
    if not (a or b):
        return None
    if any(e and len(e.values) > _MAX_PARTS for e in (a, b)):
        return False
    if len(answer_forms.elements(gold)) > 1 or len(answer_forms.elements(found)) > 1:
        return None
    one, other = _value(a, gold), _value(b, found)
    if one is not None and other is not None and (not a or not b or _normal(a.name) == _normal(b.name)):
        return _same(one, other)
    # Of two equations with variables one may be the other rearranged.
    return None if a and b and re.search("[a-zA-Z]", gold + found) else False


def _value(equation: answer_forms.Equation | None, text: str) -> str | None:
    """The one value that an equation states; None where it states none, or several."""
    if equation is None:
        return text
    *others, last = map(_clean, equation.values)
    return last if all(_same(last, other) for other in others) else None


def _same_list(gold: str, found: str) -> bool | None:
    a, b = ([t] if numerals.read(t) else answer_forms.elements(t) for t in (gold, found))
    one, other = answer_forms.enclosed(gold), answer_forms.enclosed(found)
    if one and other and one[0] == other[0] and ("{" in one[0] or max(len(one[1]), len(other[1])) > 1):
        if "{" not in one[0]:
            return _in_order(one[1], other[1])
        return _in_any_order(one[1], other[1]) if len(one[1]) == len(other[1]) else None
    if max(len(a), len(b)) < 2:
        return None
    for inside, outside in ((one, b), (other, a)):
        if inside and len(inside[1]) == len(outside) > 1:
            return (_in_any_order if "{" in inside[0] else _in_order)(inside[1], outside)
    if len(a) == len(b):
        return _in_any_order(a, b)
    relation = re.search(r"[<>]|\\(?:leq?|geq?|in|cup|infty)(?![a-zA-Z])", gold + found)
    return None if relation else False


def _in_order(gold: list[str], found: list[str]) -> bool:
    return len(gold) == len(found) and all(map(matches, gold, found))


def _in_any_order(gold: list[str], found: list[str]) -> bool | None:
    """Return whether each part has a partner of its own; None where too many are not plainly the same."""
    left = [_part(part) for part in found]
    rest = []
    for part in map(_part, gold):
        same = next((i for i, other in enumerate(left) if _plainly_same(part, other)), None)
        if same is None:
            rest.append(part)
        else:
            del left[same]
    if len(rest) != len(left):
        return False
    if len(rest) > _MAX_UNLIKE_PARTS:
        return None
    for part in rest:
        same = next((i for i, other in enumerate(left) if _same(part.text, other.text)), None)
        if same is None:
            return False
        del left[same]
    return True


class _Part(NamedTuple):
    text: str
    normal: str
    number: numerals.Numeral | None


def _part(text: str) -> _Part:
    text = _clean(text)
    return _Part(text, _normal(text), numerals.read(text))


def _plainly_same(a: _Part, b: _Part) -> bool:
    return a.normal == b.normal or bool(a.number and b.number and numerals.equal(a.number, b.number))


def _same_words(gold: str, found: str) -> bool | None:
    """Letters are no factors of a word: what is words only equals only itself, which is settled before."""
    if answer_forms.is_phrase(gold) or answer_forms.is_phrase(found):
        return False
    return None


def _same_unit(gold: str, found: str) -> bool | None:
    (a, unit), (b, other) = (
        (text, n.unit) if (n := numerals.read(text)) else units.split(text) for text in (gold, found)
    )
    if not unit.agrees(other):
        return False
    if (a, b) != (gold, found):
        return _same(a.strip(), b.strip())
    return None if answer_forms.words(a) == answer_forms.words(b) else False


def _score(completion: str, gold: Any, fallback: str) -> float | None:
    golds = [text for g in (gold if isinstance(gold, list) else [gold]) if (text := _reference(g))]
    if not golds:
        return None
    found = extract(completion, fallback)
    return float(found is not None and any(matches(g, found) for g in golds))


def _reference(gold: str | None) -> str | None:
    """The answer in a reference, which may be a whole solution; None where it says nothing."""
    if gold is None:
        return None
    if "####" in gold or r"\boxed" in gold or r"\fbox" in gold:
        gold = extract(gold, "none") or ""
    clean = _clean(gold) if len(gold) <= numerals.MAX_DIGITS else gold.strip()
    return None if clean.casefold() in ("", "nan", "null", "<na>") else gold


def _clean(text: str) -> str:
    text = _LETTER.sub(r" \1", text)
    for _ in range(2):  # marks can stand inside of brackets, and the other way round
        text = numerals.clean(unmarked(text))
    return text


def _normal(text: str) -> str:
    """A text without what does not change its meaning: spaces, kinds of fractions, case of words."""
    text = re.sub(r"(?<!\\)\\[,;:! ]|(?<![\d,]) +| +(?!\d)", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace(r"\varnothing", r"\emptyset")
    if answer_forms.is_phrase(text):
        return re.sub(r"\s", "", answer_forms.unwrapped(text)).casefold()
    bare = numerals.peel(text, "()")
    return bare.casefold() if bare.isalpha() and (len(bare) > 1 or bare != text) else text


def _may_take_long(text: str) -> bool:
    """Return whether parsing, evaluating or simplifying could explode."""
    if len(text) > _MAX_CHARACTERS or _depth(text) > _MAX_DEPTH:
        return True
    if re.search(r"\\(?:i*int|oint|sum|prod|lim|bigcup|bigcap)(?![a-zA-Z])", text):
        return True
    if "!" in text and (
        "^" in text or any(_large(n, _MAX_FACTORIAL) for n in re.findall(r"(\w*)\s*!", text))
    ):
        return True
    if (
        any(_large(n, _MAX_FACTORIAL) for n in re.findall(r"binom\D{0,3}(\d+)", text))
        or text.count(r"\exp") > 2
    ):
        return True
    powers = 1
    for exponent in _exponents(text.replace("**", "^")):
        if re.search(r"(?:[\d)}e]|\\pi)\s*\^", exponent):  # a tower
            return True
        for digits in re.findall(r"\d+", exponent):
            powers *= _MAX_POWER + 1 if _large(digits, _MAX_POWER) else max(1, int(digits))
    longest = max((len(digits) for digits in re.findall(r"\d+", text)), default=1)
    return powers > _MAX_POWER or powers * longest > _MAX_POWER_DIGITS


def _large(digits: str, limit: int) -> bool:
    """Return whether an operand is above the limit, or is not a number (and may stand for anything)."""
    return not digits.isdecimal() or len(digits) > 8 or int(digits) > limit


def _exponents(text: str) -> Iterable[str]:
    """Exponents: the text above each ``^``, its group, or the run up to the next sign."""
    for match in re.finditer(r"\^\s*", text):
        start = match.end()
        if text[start : start + 1] in ("{", "("):
            depth = 0
            for i in range(start, len(text)):
                depth += (text[i] in "{(") - (text[i] in "})")
                if depth == 0:
                    yield text[start + 1 : i] + ("^" if text[i + 1 :].lstrip().startswith("^") else "")
                    break
            else:
                yield text[start:]
        else:
            run = re.match(r"[+-]?[\w.\\]*\s*\^?", text[start:])
            yield run[0] if run else ""


def _depth(text: str) -> int:
    depth = deepest = 0
    for c in text:
        depth += (c in "{([") - (c in "})]")
        deepest = max(deepest, depth)
    return deepest


@functools.cache
def _verifier() -> Callable[[str, str], bool]:
    """math-verify as a comparison of two bare LaTeX answers, without its timers and their warning.

    It takes numbers for equal whose difference is below 1e-15, or 1e-6 where one is a decimal. That is
    checked again, relative to their size.
    """
    import math_verify
    import sympy

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

    def parse(text: str) -> Any:
        boxed = f"\\boxed{{{text}}}"
        return math_verify.parse(boxed, targets, fallback_mode="no_fallback", parsing_timeout=None)

    def near(a: Any, b: Any) -> bool:
        if not all(isinstance(x, sympy.Expr) and not x.has(sympy.UnevaluatedExpr) for x in (a, b)):
            return True
        symbols = sorted(a.free_symbols | b.free_symbols, key=str)
        values = {symbol: sympy.Rational(7 + 2 * n, 5) for n, symbol in enumerate(symbols)}
        digits = _EXACT_DIGITS
        x, y, difference = (sympy.N(e.subs(values), digits) for e in (a, b, a - b))
        if not all(e.is_number and e.is_finite for e in (x, y, difference)):
            return True
        exact = not (a.has(sympy.Float) or b.has(sympy.Float))
        relative = 10.0 ** (5 - digits) if exact else _FLOAT_TOLERANCE
        return bool(abs(difference) <= max(abs(x), abs(y)) * relative + 10.0**-100)

    def compare(gold: str, found: str) -> bool:
        a, b = parse(gold), parse(found)
        return bool(math_verify.verify(a, b, timeout_seconds=None)) and (not a or not b or near(a[0], b[0]))

    return compare
