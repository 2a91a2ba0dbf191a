r"""Units behind (or, of currencies, before) a value: ``5 km``, ``\$5``, ``12\text{ cm}^2``, ``7 red apples``.

Units are compared, never converted. Known ones (``_SPELLINGS``) have to be the same, with their powers. Of
other words (``apples``) those of one side have to be among those of the other.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

CURRENCY = r"(?:US\s?)?(?:\$|[€£¥₹₽₩₫฿₺])|(?:USD|EUR|GBP|Rs\.?)(?![a-zA-Z])"
TEXT = r"\\(?:text|textrm|textbf|textit|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname|emph)\s*\{"

_SPELLINGS = {
    spelling: unit
    for unit, spellings in {
        "m": "m meter metre", "km": "km kilometer kilometre", "cm": "cm centimeter centimetre",
        "mm": "mm millimeter millimetre", "in": "in inch", "ft": "ft foot feet", "yd": "yd yard",
        "mi": "mi mile", "g": "g gram", "kg": "kg kilogram kilo", "mg": "mg milligram", "oz": "oz ounce",
        "ton": "ton tonne", "pound": "lb pound £ GBP", "s": "s sec second", "min": "min minute",
        "h": "h hr hour", "day": "day", "week": "week wk", "month": "month", "year": "year yr",
        "L": "L l liter litre", "kL": "kL", "mL": "mL ml milliliter millilitre",
        "dollar": "$ US$ USD dollar buck", "cent": "cent ¢", "euro": "€ EUR euro", "yen": "¥ yen",
        "rupee": "₹ Rs rupee", "deg": "degree", "rad": "rad radian", "C": "celsius", "F": "fahrenheit",
        "km/h": "kph kmh", "mi/h": "mph", "N": "N newton", "J": "J joule", "W": "W watt",
        "kW": "kW kilowatt", "V": "V volt", "Hz": "Hz hertz", "Pa": "Pa pascal", "mol": "mol mole",
        "unit": "unit", "person": "person people",
    }.items()
    for spelling in spellings.split()
}  # fmt: skip
_IGNORED = frozenset(
    "a an the of in per each every total altogether left more less away old long tall high wide deep "
    "remaining about approximately is are was were will be degrees".split()
)
_NO_UNIT = frozenset("and or pi sqrt inf infinity times mod not".split())
_TOKEN = re.compile(
    rf"(?P<space>[\s,.()~]+|\\[,;:! ])|(?P<open>{TEXT})|(?P<close>\}})"
    r"|(?P<degree>\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z]))(?:\s*(?P<scale>[CF])(?![a-zA-Z]))?"
    r"|\^\s*\{?\s*(?P<power>-?\d)\s*\}?|(?P<per>/|per(?![a-zA-Z]))"
    rf"|(?P<currency>{CURRENCY}|¢)|(?P<word>[A-Za-z]+(?:[-'][A-Za-z]+)*)"
)
_ANGLE_WITHIN = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_START = re.compile(rf"\s|{TEXT}|\^\s*\{{?\s*\\circ|(?<=[\d}})])(?=[a-zA-Z])")


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit; empty when nothing was said."""

    measure: frozenset[tuple[str, int]] = frozenset()
    """Known units with their powers."""
    words: frozenset[str] = frozenset()
    """Other words, lower case, singular."""

    def __bool__(self) -> bool:
        return bool(self.measure or self.words)

    def agrees(self, other: Unit) -> bool:
        """Return whether both can be said of one value; an empty one goes with every other."""
        if not self or not other:
            return True
        if self.measure or other.measure:
            return self.measure == other.measure
        return self.words <= other.words or other.words <= self.words


def read(text: str, currency: str = "") -> Unit | None:
    """The unit that the whole of a text behind a number is, or None; ``currency`` stood before the number."""
    found = _Reader()
    if currency:
        found.known(_known(currency) or currency)
    i = depth = 0
    spaced = False
    while i < len(text):
        match = _TOKEN.match(text, i)
        if match is None:
            return None
        i = match.end()
        depth += (match["open"] is not None) - (match["close"] is not None)
        if match["per"]:
            found.sign = -1
        elif match["power"]:
            found.power(int(match["power"]))
        elif match["degree"] or match["currency"]:
            sign = match["scale"] or ("deg" if match["degree"] else match["currency"])
            found.known(_known(sign) or sign)
        elif (word := match["word"]) and not found.word(word):
            # A word that is not a known unit stands after a space or in \\text: in 3x and 2 pi there is none.
            if word.lower() in _NO_UNIT or not (
                depth or word.lower() in _IGNORED or (spaced and len(word) > 2)
            ):
                return None
            if found.sign > 0 and word.lower() not in _IGNORED:
                found.words.add(_singular(word.lower()))
        spaced = match["space"] is not None or match["per"] is not None
    return Unit(frozenset((u, n) for u, n in found.measure.items() if n), frozenset(found.words))


class _Reader:
    """The part of a unit that has been read so far."""

    def __init__(self) -> None:
        self.measure: Counter[str] = Counter()
        self.words: set[str] = set()
        self.sign = 1
        self._last = ""
        self._next_power = 1

    def known(self, unit: str) -> None:
        if unit in ("C", "F") and self.measure["deg"] == 1:
            del self.measure["deg"]
        for name, factor in zip(unit.split("/"), (1, -1), strict=False):
            self.measure[name] += self.sign * factor * self._next_power
        self._last, self._next_power = unit, 1

    def power(self, power: int) -> None:
        self.measure[self._last] += self.sign * (power - 1) if self._last else 0

    def word(self, word: str) -> bool:
        """Return whether it is a known unit, or one of the words of its power."""
        if match := re.fullmatch(r"(?:(square|sq)|(cubic)|(squared)|(cubed))\.?", word, re.IGNORECASE):
            power = 2 if match[1] or match[3] else 3
            if match[1] or match[2]:
                self._next_power = power
            else:
                self.power(power)
            return True
        unit = _known(word)
        if unit:
            self.known(unit)
        return unit is not None


def split(text: str) -> tuple[str, Unit]:
    r"""(value, unit) of an expression with a unit at its end: ``5\sqrt{2}\text{ cm}``."""
    for match in _START.finditer(text):
        value, suffix = text[: match.start()].rstrip(), text[match.start() :]
        if not value or value[-1] in r"\^_=<>+-*/({[,&" or _ANGLE_WITHIN.search(value):
            continue
        unit = read(suffix)
        if not unit:
            continue
        # One letter may as well be a variable, and a word part of a sentence: behind numbers they are units.
        sure = suffix.lstrip().startswith("\\") or (unit.measure and len(suffix.strip()) > 1)
        if sure or not re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", value)):
            return value, unit
    return text, Unit()


def _known(word: str) -> str | None:
    for spelling in (word.rstrip("."), word.lower(), _singular(word.lower())):
        if spelling in _SPELLINGS and (len(spelling) > 1 or spelling == word):
            return _SPELLINGS[spelling]
    return None


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word
