"""Dates and times of day in answers: ``2021-01-02``, ``01/02/2021``, ``January 2, 2021``, ``3:45 PM``.

Of a date in numbers the month comes first where it can (``13/02/2021`` has the day first). A year, or am and
pm, that only one side states is ignored. ``10:20`` is a time where the other side is one too, else a ratio.
"""

from __future__ import annotations

import re

_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
_MONTH = r"(?P<month>jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_DATES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<year>\d{4})(?P<sep>[-/])(?P<month>\d{1,2})(?P=sep)(?P<day>\d{1,2})",
        r"(?P<month>\d{1,2})(?P<sep>[-/])(?P<day>\d{1,2})(?P=sep)(?P<year>\d{4})",
        rf"{_MONTH}\s*{_DAY}(?:\s*,?\s*{_YEAR})?",
        rf"{_DAY}\s*(?:of\s*)?{_MONTH}(?:\s*,?\s*{_YEAR})?",
    )
]
_TIME = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d{2})(?::(?P<second>\d{2}))?)?\s*(?P<half>[ap]\.?\s?m\.?)?",
    re.IGNORECASE,
)

Date = tuple[int | None, int, int]
"""(year, month, day)"""
Time = tuple[int, int, int, bool]
"""(hour, minute, second, whether it said am or pm); the hour of a 24-hour day if it did."""


def read_date(text: str) -> Date | None:
    """The date that the whole of a text is, or None."""
    for pattern in _DATES:
        if match := pattern.fullmatch(text.strip()):
            name, day = match["month"].lower(), int(match["day"])
            month = int(name) if name.isdecimal() else _MONTHS.index(name[:3]) + 1
            if month > 12 and pattern is _DATES[1]:
                month, day = day, month
            if 1 <= month <= 12 and 1 <= day <= 31:
                return int(match["year"]) if match["year"] else None, month, day
    return None


def read_time(text: str) -> Time | None:
    """The time of day that the whole of a text is, or None."""
    match = _TIME.fullmatch(text.strip())
    if match is None or not (match["minute"] or match["half"]):
        return None
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    if hour > 24 or minute > 59 or second > 59 or (match["half"] and not 1 <= hour <= 12):
        return None
    if match["half"]:
        return hour % 12 + 12 * (match["half"][0] in "pP"), minute, second, True
    return hour, minute, second, False


def equal(a: str, b: str) -> bool | None:
    """Return whether two texts are the same date or time.

    None where at most one is a date or time and it may be a number.
    """
    one, other = read_date(a), read_date(b)
    if one or other:
        return one is not None and other is not None and _same_date(one, other)
    first, second = read_time(a), read_time(b)
    if first and second:
        return _same_time(first, second)
    return None


def _same_date(a: Date, b: Date) -> bool:
    return a[1:] == b[1:] and (a[0] == b[0] or None in (a[0], b[0]))


def _same_time(a: Time, b: Time) -> bool:
    cycle = 12 if a[3] != b[3] and all(1 <= t[0] <= 12 for t in (a, b) if not t[3]) else 25
    return a[1:3] == b[1:3] and a[0] % cycle == b[0] % cycle
