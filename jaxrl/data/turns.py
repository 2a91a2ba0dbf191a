"""Ends of turns: what the chat template writes after an assistant's message, and which id it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl.config import ConfigError
from jaxrl.data.tokenizer import Message, Tokenizer

_ASKED, _ANSWERED, _GOES_ON = "First question", "Only answer", "Next question"


@dataclasses.dataclass(frozen=True)
class TurnEnd:
    """The end of an assistant's message."""

    token_id: int
    text: str
    """The token's text, with the white space that the template writes before it."""
    opens_next: bool
    """The template writes it only where another message follows."""


def find_turn_end(
    render: Callable[[Sequence[Message]], str], tokenizer: Tokenizer, system_prompt: str | None = None
) -> TurnEnd | None:
    """The token with which a chat template ends an assistant's message.

    It is the first added token after the message. Where none comes before the next message, it is the one
    that the next message begins with, if that is a stop id or does not open a conversation too.

    Args:
        render: text of a conversation, without a generation prompt.

    Returns None where the template writes no such token, or refuses the conversations tried.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    asked = [*system, {"role": "user", "content": _ASKED}]
    talk = [*asked, {"role": "assistant", "content": _ANSWERED}]
    try:
        _, answered, after = render(talk).rpartition(_ANSWERED)
        if not answered:
            return None
        if (found := first_token(after, tokenizer)) is not None:
            token_id, before, token = found
            return TurnEnd(token_id, before + token, opens_next=False)
        longer = render([*talk, {"role": "user", "content": _GOES_ON}])
        opening = render(asked).partition(_ASKED)[0]
    except ConfigError:
        return None
    between = longer.rpartition(_ANSWERED)[2].partition(_GOES_ON)[0]
    found = first_token(between, tokenizer)
    if found is None:
        return None
    token_id, before, token = found
    opens_role = token in opening and token_id not in tokenizer.stop_ids
    return None if opens_role or before.strip() else TurnEnd(token_id, before + token, opens_next=True)


def first_token(text: str, tokenizer: Tokenizer) -> tuple[int, str, str] | None:
    """The first stop id or added token in ``text``: its id, the text before it, and its own."""
    ids = {tokenizer.decode([i]): i for i in tokenizer.stop_ids} | tokenizer.added_tokens
    # Of two that begin at one place, the longer one is meant.
    places = [(text.index(token), -len(token), token) for token in ids if token.strip() and token in text]
    if not places:
        return None
    at, _, token = min(places)
    return ids[token], text[:at], token
