"""Numbers as people and models write them in answers, read exactly: no floats, no evaluation, linear time.

Reads integers, decimals, thousands separators (``1,234``, ``1{,}234``, ``1\\,234``), fractions (``3/4``,
``\\frac34``), mixed numbers (``3 1/2``, ``2\\frac{3}{4}``), powers of ten (``1.5e3``, ``1.5 \\times 10^3``),
percent and currency signs, units after the number, and words of scale (``5 million``). Anything else
(``2\\pi``, ``3x``, ``2^{10}``, lists) is not a plain number. ``read_based`` reads ``1010_2``.
"""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from jaxrl.rewards import units

MAX_DIGITS = 20_000
_MAX_EXPONENT = 2_000
_ROUNDED_DECIMALS = 6
_LONG_BITS = 1_000

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
        "\u00a0": " ", "\u2007": " ", "\u2009": r"\,", "\u202f": r"\,",
        "\u00d7": r"\times ", "\u22c5": r"\cdot ", "\u00b7": r"\cdot ", "\u00f7": r"\div ",
        "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b0": r"^\circ ", "\u00b2": "^2", "\u00b3": "^3",
    }
)  # fmt: skip
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|boldsymbol|bm|boxed|fbox)\s*\{"
)
_SPACING = re.compile(
    r"\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])|(?<!\\)\\[!;:> ]|~|\\q?quad(?![a-zA-Z])"
)

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_EXPONENT = r"10\s*\^\s*(?:\{\s*(?P<e1>[+-]?\s*\d+)\s*\}|(?P<e2>\d))"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<currency>{units.CURRENCY})?\s*(?P<sign2>-?)\s*(?:"
    rf"(?P<mantissa>{_DECIMAL})\s*(?:\\times|\\cdot|\*|[xX])\s*{_EXPONENT}"
    rf"|10\s*\^\s*(?:\{{\s*(?P<e3>[+-]?\s*\d+)\s*\}}|(?P<e4>\d))"
    rf"|(?P<short>{_DECIMAL})[eE](?P<e5>[+-]?\d+)"
    r"|(?:(?P<whole>\d+)\s*)?\\[dtc]?frac\s*(?:\{\s*(?P<n1>-?[\d.,]+)\s*\}|(?P<n2>\d))\s*(?:\{\s*(?P<d1>-?[\d.,]+)\s*\}|(?P<d2>\d))"
    r"|(?:(?P<whole2>\d+)\s+)?(?P<n3>[\d.,]+)\s*/\s*(?P<d3>-?[\d.,]+)"
    rf"|(?P<plain>{_DECIMAL})"
    r")"
)
_PERCENT = re.compile(
    r"\s*(?:\\?%|(?:\\(?:text|mathrm)\s*\{)?\s*(?:percent(?:age)?|pct)(?![a-zA-Z])\.?\s*\}?)", re.IGNORECASE
)
_SCALE = re.compile(
    r"\s*(?:\\(?:text|mathrm)\s*\{)?\s*(hundred|thousand|million|billion|trillion)(?![a-zA-Z])\s*\}?",
    re.IGNORECASE,
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"twelve": 12, "sixteen": 16}
_BASED = re.compile(
    r"[({]?\s*(?P<digits>\d[0-9A-Za-z]{0,999})\s*[)}]?\s*(?:"
    rf"_\s*\{{?\s*(?:{units.TEXT}\s*)?(?P<base>\d\d?|{'|'.join(_BASES)})\s*\}}?\s*\}}?"
    rf"|\(?(?:in )?base[ -](?P<base2>\d\d?|{'|'.join(_BASES)})\)?)",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numeral:
    """A number and how it was written."""

    value: Fraction
    """The value; 1/2 for 50%."""
    percent: bool
    decimals: int | None
    """Digits after the point of a plain decimal; None for a fraction."""
    unit: units.Unit

    @property
    def long(self) -> bool:
        return max(self.value.numerator.bit_length(), self.value.denominator.bit_length()) > _LONG_BITS

    def canonical(self) -> str:
        """One spelling for equal values; of very long numbers a hash, which is as good for counting."""
        return f"number#{hash(self.value):x}" if self.long else str(self.value)

    def latex(self) -> str:
        """The value (not ``long``) without unit and separators; decimals stay decimals."""
        if not self.decimals:
            return self.canonical()
        digits = str(abs(int(self.value * 10**self.decimals))).zfill(self.decimals + 1)
        return f"{'-' * (self.value < 0)}{digits[: -self.decimals]}.{digits[-self.decimals :]}"


def clean(text: str) -> str:
    """The text with its Unicode signs, spacing commands and outer wrapping turned into plain LaTeX."""
    text = text.translate(_CHARACTERS).replace(r"\$", "$")
    text = re.sub(r"\s+", " ", _SPACING.sub(" ", text))
    for _ in range(4):  # what ends the whole can stand inside of what encloses it, and the other way round
        text = peel(_without_dollars(text.strip()).rstrip(" .,;:"))
    return text


def _without_dollars(text: str) -> str:
    """The text without the signs of LaTeX around it; one before a number is a currency."""
    if text[:2] in (r"\(", r"\[") and text[-2:] in (r"\)", r"\]"):
        text = text[2:-2].strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text if re.match(r"\$\s*-?[\d.]", text) else text.removeprefix("$")


def read(text: str) -> Numeral | None:
    """The number that the whole of a ``clean`` text is, or None."""
    if len(text) > MAX_DIGITS:
        return None
    if text.startswith("(") and text.endswith(")") and "," not in text:
        inner = peel(text, "()")
        text = inner if inner != text else text
    text = (
        text.replace("{,}", ",").replace(r"\,", "")
        if re.search(r"\d\s*(?:\{,\}|\\,)\s*\d", text)
        else text.replace(r"\,", " ")
    )
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    percent, scale, unit = _suffixes(text.strip()[match.end() :], match["currency"] or "")
    if unit is None:
        return None
    try:
        value, decimals = _value(match)
    except (ValueError, ZeroDivisionError, InvalidOperation):
        return None
    if "-" in (match["sign"], match["sign2"]):
        value = -value
    value *= 10**scale
    return Numeral(
        value=value / 100 if percent else value,
        percent=percent,
        decimals=None if scale else decimals,
        unit=unit,
    )


def equal(a: Numeral, b: Numeral) -> bool:
    """Return whether two answers name the same number.

    Values are compared exactly, with two allowances: where one has a percent sign and the other has none, 25%
    matches both 0.25 and 25; and a decimal of at least 6 places matches the fraction it is the rounding of.
    Units of both have to agree (``units.py``).
    """
    if not a.unit.agrees(b.unit) or (a.percent and b.unit) or (b.percent and a.unit):
        return False
    if a.value == b.value or (a.percent != b.percent and _shown(a) == _shown(b)):
        return True
    return _is_rounding(a, b) or _is_rounding(b, a)


def _shown(n: Numeral) -> Fraction:
    return n.value * 100 if n.percent else n.value


def _is_rounding(rounded: Numeral, of: Numeral) -> bool:
    if rounded.decimals is None or of.decimals is not None or rounded.decimals < _ROUNDED_DECIMALS:
        return False
    return 2 * abs(_shown(rounded) - _shown(of)) * 10**rounded.decimals <= 1


def _value(match: re.Match[str]) -> tuple[Fraction, int | None]:
    exponent = next((match[e] for e in ("e1", "e2", "e3", "e4", "e5") if match[e]), None)
    if exponent is not None:
        power = int(exponent.replace(" ", "")) if len(exponent) < 9 else _MAX_EXPONENT + 1
        if abs(power) > _MAX_EXPONENT:
            raise ValueError
        return _decimal(match["mantissa"] or match["short"] or "1") * Fraction(10) ** power, None
    above, below = (
        next((match[g] for g in names if match[g]), None)
        for names in (("n1", "n2", "n3"), ("d1", "d2", "d3"))
    )
    if above is not None and below is not None:
        value = _decimal(above) / _decimal(below)
        whole = match["whole"] or match["whole2"]
        if whole:
            if not 0 < value < 1:
                raise ValueError  # 2\frac{4}{3} is a product
            value += _decimal(whole)
        return value, None
    plain = match["plain"]
    return _decimal(plain), len(plain.partition(".")[2])


def _decimal(text: str) -> Fraction:
    if not re.fullmatch(rf"-?(?:{_DECIMAL})", text):
        raise ValueError
    # Through Decimal, because int(str) refuses more than 4,300 digits; its constructor is exact.
    return Fraction(Decimal(re.sub("[, ]", "", text)))


def _suffixes(text: str, currency: str) -> tuple[bool, int, units.Unit | None]:
    """(percent, power of ten, unit) of the text after a number; the unit is None for other texts."""
    scale = 0
    if match := _SCALE.match(text):
        scale, text = _SCALES[match[1].lower()], text[match.end() :]
    if match := _PERCENT.match(text):
        return True, scale, None if text[match.end() :].strip(" .") else units.Unit()
    return False, scale, units.read(text.rstrip(" ."), currency)


def read_based(text: str) -> tuple[str, int] | None:
    """(digits, base) of ``1010_2``, ``(2A)_{16}`` or ``1010 base 2``; None for other texts.

    The first of the digits has to be 0 to 9: ``A_{12}`` is an entry of a matrix.
    """
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    digits, base = match["digits"].lower().lstrip("0") or "0", (match["base"] or match["base2"]).lower()
    number = _BASES.get(base) or int(base)
    if not 2 <= number <= 36 or any(int(d, 36) >= number for d in digits):
        return None
    return digits, number


def equal_based(a: tuple[str, int] | None, b: tuple[str, int] | None, text: str) -> bool:
    """Return whether two answers, one or both with a base, are equal; ``text`` is that of the one without.

    A base on one side only is ignored: the digits have to be the same.
    """
    if a and b:
        return a[0] == b[0] if a[1] == b[1] else int(a[0], a[1]) == int(b[0], b[1])
    with_base = a or b
    plain = re.sub(r"[\s,]", "", peel(text, "()")).lower().lstrip("0") or "0"
    return with_base is not None and with_base[0] == plain


def peel(text: str, pair: str = "{}") -> str:
    """Take off the brackets (and \\text, \\boxed, ...) that enclose the whole text, in linear time."""
    closes: dict[int, int] = {}
    open_at: list[int] = []
    for i, c in enumerate(text):
        if c in pair and not (i and text[i - 1] == "\\"):
            if c == pair[0]:
                open_at.append(i)
            elif open_at:
                closes[open_at.pop()] = i
    start, end = 0, len(text)
    while start < end:
        match = _WRAPPER.match(text, start) if pair == "{}" else None
        brace = match.end() - 1 if match else start
        if closes.get(brace) != end - 1:
            break
        start, end = brace + 1, end - 1
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
    return text[start:end]
