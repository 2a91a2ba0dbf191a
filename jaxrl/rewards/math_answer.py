"""``math_answer``: 1 when the final answer of a completion equals the reference, mathematically; else 0.

The answer is what stands in the last ``\\boxed{...}``, ``<answer>...</answer>`` or after the last ``####``,
whichever is later in the text; without any of them, what follows "answer is" or "answer:" (see ``fallback``).
Earlier ones do not count, so listing candidates earns nothing. Plain numbers are compared exactly
(``numerals.py``), everything else by math-verify, through its LaTeX parser: no text is evaluated as Python
(the parser's number tokens, nothing but digits, go through sympy's reader).

Expressions that could take long (towers of powers, huge factorials, deep nesting, sums and integrals, long
texts) are compared as text. The time limits of math-verify need the main thread, so they are off; the limit
of reward workers stands behind the rest.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl.rewards import numerals
from jaxrl.rewards.calls import reference_column

_FALLBACKS = ("phrase", "last_number", "none")
_MAX_CHARACTERS = 400
_MAX_DEPTH = 16
_MAX_POWER = 10_000
_MAX_POWER_DIGITS = 100_000
_MAX_FACTORIAL = 1_000

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_PHRASE = re.compile(r"\banswers?\b[^\n.:=]{0,60}?(?:\bis\b|\bare\b|[:=])[\s*_:]*", re.IGNORECASE)
_LATEX = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_LAST_NUMBER = re.compile(r"[+\-\u2212]?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?\s*%?")


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
    """The final answer in a normal form: equal numbers give equal strings."""
    text = extract(completion, fallback)
    if text is None or len(text) > numerals.MAX_DIGITS:
        return text
    text = numerals.clean(text)
    number = numerals.read(text)
    return number.canonical() if number else _normal(text) or None


def problems(args: Mapping[str, Any]) -> Iterable[str]:
    if args.get("fallback", "phrase") not in _FALLBACKS:
        yield f"fallback {args['fallback']!r}; needed is one of {list(_FALLBACKS)}"
    if not isinstance(args.get("gold", ""), str):
        yield f"gold {args['gold']!r}; needed is the name of a column"


def prepare() -> None:
    """Import math-verify and let its parser build its tables (seconds)."""
    matches(r"(x+1)^2", r"x^2+2x+1")


def matches(gold: str, found: str) -> bool:
    """Whether two bare answers (LaTeX or plain) are equal."""
    if max(len(gold), len(found)) > numerals.MAX_DIGITS:
        return gold.strip() == found.strip()
    gold, found = numerals.clean(gold), numerals.clean(found)
    if not gold or not found:
        return False
    if _normal(gold) == _normal(found):
        return True
    if "=" not in gold:
        found = _right_side(found)
    elif "=" not in found:
        gold = _right_side(gold)
    a, b = numerals.read(gold), numerals.read(found)
    if a and b:
        return numerals.equal(a, b)
    if re.search(r"\d \d", gold + "|" + found):  # LaTeX would read "3 4" as 34
        return False
    gold, found = (n.latex() if n and not (n.percent or n.long) else s for n, s in ((a, gold), (b, found)))
    if _may_take_long(gold) or _may_take_long(found):
        return False
    return _verifier()(gold, found)


def extract(completion: str, fallback: str = "phrase") -> str | None:
    """The final answer as written, or None."""
    places: list[tuple[int, Callable[[], str | None]]] = []
    if (box := max(completion.rfind(r"\boxed"), completion.rfind(r"\fbox"))) >= 0:
        places.append((box, lambda: _boxed(completion, box)))
    if (mark := completion.rfind("####")) >= 0:
        places.append((mark, lambda: completion[mark + 4 :].lstrip(" \t#").partition("\n")[0]))
    if (tag := completion.rfind("<answer>")) >= 0:
        places.append((tag, lambda: _tagged(completion[tag:])))
    if places:
        found = max(places)[1]()
    elif fallback == "none":
        found = None
    else:
        found = _after_phrase(completion)
        if found is None and fallback == "last_number":
            found = _last_number(completion)
    found = found.strip() if found else ""
    return found or None


def _score(completion: str, gold: Any, fallback: str) -> float | None:
    if gold is None:
        return None
    found = extract(completion, fallback)
    if found is None:
        return 0.0
    golds = gold if isinstance(gold, list | tuple) else [gold]
    return float(any(matches(_reference(str(g)), found) for g in golds))


def _reference(gold: str) -> str:
    """The answer in a reference column, which may hold a whole solution."""
    return (extract(gold, "none") or "") if "####" in gold or r"\boxed" in gold or r"\fbox" in gold else gold


def _boxed(text: str, start: int) -> str | None:
    match = _BOX.match(text, start)
    if match is None or match.end() == len(text):
        return None
    if text[match.end()] != "{":  # \boxed 5
        return re.split(r"[\s$]", text[match.end() :], maxsplit=1)[0]
    depth = 0
    for i in range(match.end(), len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[match.end() + 1 : i]
    return None  # cut off


def _tagged(text: str) -> str | None:
    match = _TAG.match(text)
    inner = match[1] if match else ""
    return _after_phrase(inner) or inner


def _after_phrase(text: str) -> str | None:
    ends = [match.end() for match in _PHRASE.finditer(text)]
    if not ends:
        return None
    line = text[ends[-1] :].partition("\n")[0]
    if latex := _LATEX.match(text, ends[-1]):
        return next(group for group in latex.groups() if group is not None)
    end = _SENTENCE_END.search(line)
    return (line[: end.start()] if end else line).strip("*_` ")


def _last_number(text: str) -> str | None:
    found = _LAST_NUMBER.findall(text)
    return found[-1] if found else None


def _right_side(text: str) -> str:
    """``5`` of ``x = 5`` or ``f(x) = 5``: the answer without the name that it is given."""
    name, sign, value = text.partition("=")
    return (
        value.strip()
        if sign and re.fullmatch(r"\\?[A-Za-z]\w*(?:_\{?\w+\}?)?(?:\([a-zA-Z]\))?\s*", name)
        else text
    )


def _normal(text: str) -> str:
    """A text without what does not change its meaning: spaces, kinds of fractions, case of words."""
    text = re.sub(r"(?<!\\)\\[,;:! ]|(?<!\d) +| +(?!\d)", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    bare = numerals.peel(text, "()")
    return bare.casefold() if bare.isalpha() and (len(bare) > 1 or bare != text) else text


def _may_take_long(text: str) -> bool:
    """Whether parsing, evaluating or simplifying could explode."""
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
    """Whether an operand is above the limit, or no number (what it stands for may be anything)."""
    return not digits.isdecimal() or len(digits) > 8 or int(digits) > limit


def _exponents(text: str) -> Iterable[str]:
    """What stands above each ``^``: its group, or the run up to the next sign."""
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
    """math-verify as a comparison of two bare LaTeX answers, without its timers and their warning."""
    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    targets = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

    def parse(text: str) -> Any:
        boxed = f"\\boxed{{{text}}}"
        return math_verify.parse(boxed, targets, fallback_mode="no_fallback", parsing_timeout=None)

    def compare(gold: str, found: str) -> bool:
        return bool(math_verify.verify(parse(gold), parse(found), timeout_seconds=None))

    return compare
