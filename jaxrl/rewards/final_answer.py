r"""Where the final answer of a completion stands, and its text without the marks around it.

It is what stands in the last ``\boxed{...}``, ``<answer>...</answer>`` or on the line of the last ``####``,
whichever is later in the text; without any of them, behind "answer is", "answer:" or a heading "Answer".
Earlier ones do not count, so listing candidates earns nothing. ``####`` heads sections too: "the answer is"
further down wins over it. A lead-in within the place ("The total is 72") is left off.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxrl.rewards import units

FALLBACKS = ("phrase", "last_number", "none")

_LONGEST_STATEMENT = 2_000
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
_HEADING = re.compile(
    r"(?:^|\n)[#*_ \t]*(?:the |my )?(?:final |correct )?answers?[*_: \t]*\n[\s*_]*", re.IGNORECASE
)
_PHRASE = re.compile(r"\banswers?\b[^\n.:=]{0,60}?(?:\bis\b|\bare\b|[:=])[\s*_:]*", re.IGNORECASE)
_LEAD_IN = re.compile(
    r"(?:=|(?:therefore|thus|hence|so|then)\b,?|(?:[A-Za-z',]+ ){0,10}"
    r"(?:is|are|was|were|has|have|had|equals|costs?|needs?|makes?|takes?|gets?|pays?|spends?|earns?)(?![a-zA-Z]))"
    r"[\s:*_=]*(?=.*[\d\\])",
    re.IGNORECASE,
)
_LATEX = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=[\s*_`]|$)")
_LAST_NUMBER = re.compile(r"[+\-\u2212]?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?\s*%?")
_EMPHASIS = re.compile(r"</?(?:b|strong|i|em|u|p|span)>", re.IGNORECASE)
_PLAIN_TEXT = re.compile(rf"{units.TEXT}([^{{}}]*)\}}")


def extract(completion: str, fallback: str = "phrase") -> str | None:
    """The final answer as written, or None where there is none or nothing in its place.

    Args:
        fallback: what counts without box, tag or ####. phrase: what follows "answer is"; last_number: that,
            else the last number of the text; none: nothing.
    """
    places: list[tuple[int, Callable[[], str | None]]] = []
    if (box := max(completion.rfind(r"\boxed"), completion.rfind(r"\fbox"))) >= 0:
        places.append((box, lambda: _boxed(completion, box)))
    if (mark := completion.rfind("####")) >= 0:
        places.append((mark, lambda: _after_mark(completion[mark:])))
    if (tag := max((m.end() for m in _TAG.finditer(completion)), default=-1)) >= 0:
        places.append((tag, lambda: _TAG_END.split(completion[tag:], maxsplit=1)[0]))
    if places:
        found = max(places, key=lambda place: place[0])[1]()
        found = _stated(found) if found else None
    elif fallback == "none":
        found = None
    else:
        found = _after_phrase(completion)
        if found is None and fallback == "last_number":
            found = _last_number(completion)
    return unmarked(found) or None if found else None


def unmarked(text: str) -> str:
    """The text without Markdown and HTML emphasis around the whole."""
    text = _EMPHASIS.sub("", text).strip().lstrip("*`").strip()
    bare = text.rstrip("*`").rstrip()
    text = text if bare.endswith(("^", "^{")) else bare  # z^*
    return text.removeprefix("__").removesuffix("__").strip()


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


def _after_mark(text: str) -> str | None:
    if heading := _HEADING.match(text):
        return text[heading.end() :].partition("\n")[0]
    line, _, rest = text.lstrip(" \t#").partition("\n")
    return _after_phrase(rest) or line


def _stated(text: str) -> str:
    """The answer in a place that is meant for it alone, without a lead-in."""
    if len(text) > _LONGEST_STATEMENT:
        return text
    plain = _PLAIN_TEXT.sub(r"\1", text)
    found = _after_phrase(plain)
    if found is None and (lead_in := _LEAD_IN.match(unmarked(plain))):
        found = _sentence(unmarked(plain)[lead_in.end() :])
    return found or text


def _after_phrase(text: str) -> str | None:
    ends = [match.end() for pattern in (_PHRASE, _HEADING) for match in pattern.finditer(text)]
    return _sentence(text[max(ends) :]) if ends else None


def _sentence(text: str) -> str:
    """The start of a text: its LaTeX, else its first sentence."""
    if latex := _LATEX.match(text):
        return next(group for group in latex.groups() if group is not None)
    line = text.partition("\n")[0]
    end = _SENTENCE_END.search(line)
    return line[: end.start()] if end else line


def _last_number(text: str) -> str | None:
    found = _LAST_NUMBER.findall(text)
    return found[-1] if found else None
