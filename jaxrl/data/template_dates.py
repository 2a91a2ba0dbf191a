"""Today's date, as chat templates print it: fixed for a run, so that every day renders the same prompts."""

from __future__ import annotations

import datetime
import re

from jaxrl.config import ConfigError

_CALL = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")


def prints_date(template: str) -> bool:
    """Return whether a chat template asks transformers for the time."""
    return re.search(r"strftime_now\s*\(", template) is not None


def fixed(template: str, date: str) -> str:
    """``template`` with ``date``, at midnight, in the places where it prints today's.

    Raises:
        ConfigError: it computes how the date is written (without a key: the caller knows it).
    """
    day = datetime.datetime.fromisoformat(date)
    found = _CALL.sub(lambda match: repr(day.strftime(match.group(2))), template)
    if prints_date(found):
        raise ConfigError(
            "the chat template prints today's date in a form that it computes, so a resumed run could not "
            "render the same prompts; expected strftime_now with a literal form, such as '%d %b %Y'"
        )
    return found
