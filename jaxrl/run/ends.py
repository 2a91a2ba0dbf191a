"""Ends of completions, and the part of their text that rewards read: found for a run, checked at its start.

A completion ends with a stop id, which is learned and is not part of its text, with a stop string, before
which its text is cut, or at the limit of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from jaxrl.config import ConfigError
from jaxrl.data.chat import Renderer
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.rewards import functions
from jaxrl.run.settings import RunConfig

logger = logging.getLogger("jaxrl")


def stop_ids(config: RunConfig, renderer: Renderer) -> tuple[int, ...]:
    """The ids that end a completion of the run: the model's own, the end of the chat template's turn, those
    of ``rollout``, and those of stop strings that are one special token."""
    rollout, special = config.rollout, renderer.tokenizer.special_tokens
    own = () if rollout.ignore_eos else (*renderer.stop_ids, *rollout.stop_token_ids)
    return tuple(dict.fromkeys([*own, *(special[text] for text in rollout.stop if text in special)]))


def check(config: RunConfig, renderer: Renderer, limit: int) -> None:
    """Refuse what can never happen, and say where the chat template and the stop ids differ.

    Args:
        limit: ids from here on are never sampled.

    Raises:
        ConfigError: no sample could end before the limit of tokens, a stop string or id can never be met, or
            a reward waits for a text that can never appear.
    """
    if config.samples_completions:
        problems = [*_stop_problems(config, renderer, limit), *_reward_problems(config, renderer)]
        if problems:
            raise ConfigError(problems)
    _tell(config, renderer)


def describe(renderer: Renderer, ids: Sequence[int]) -> str:
    """The stop ids of a run with their texts."""
    return ", ".join(f"{renderer.tokenizer.decode([i])!r} ({i})" for i in ids) or "none"


def _stop_problems(config: RunConfig, renderer: Renderer, limit: int) -> Iterator[tuple[str, str]]:
    rollout = config.rollout
    for i in rollout.stop_token_ids:
        if not 0 <= i < limit:
            yield "rollout.stop_token_ids", f"{i} is never sampled: ids must be from 0 to {limit - 1}"
    for text in rollout.stop:
        hidden = _special_in(text, renderer.tokenizer)
        if hidden and hidden != text and not rollout.keep_special_tokens:
            yield (
                "rollout.stop",
                f"{text!r} is never found: {hidden!r} is a special token, which is dropped from the text. "
                "Give that token alone, or set rollout.keep_special_tokens",
            )
    found = stop_ids(config, renderer)
    if not rollout.ignore_eos and not rollout.stop and not any(i < limit for i in found):
        listed = (
            f"only the ids from 0 to {limit - 1} are sampled, and all stop ids ({list(found)}) are beyond"
        )
        none = "the tokenizer, the model's generation config and the chat template have no stop id"
        yield (
            "rollout.stop_token_ids",
            f"no completion could end before max_new_tokens: {listed if found else none}. Give ids here or "
            "strings in rollout.stop, or set rollout.ignore_eos to sample to the limit",
        )


def _reward_problems(config: RunConfig, renderer: Renderer) -> Iterator[tuple[str, str]]:
    """Texts that a reward waits for, and which are dropped or cut from every completion."""
    rollout, tokenizer = config.rollout, renderer.tokenizer
    atoms = {i: text for text, i in tokenizer.added_tokens.items()}
    cuts = [*rollout.stop, *(atoms[i] for i in stop_ids(config, renderer) if i in atoms)]
    for number, term in enumerate(config.rewards.terms):
        if term.is_given:
            continue
        for text in functions.load(term.name, term.args).needs(term.args, renderer.answer_opening):
            key, title = f"rewards.terms.{number}", term.title
            hidden = "" if rollout.keep_special_tokens else _special_in(text, tokenizer)
            cut = next((stop for stop in cuts if stop in text), "")
            if hidden:
                yield (
                    key,
                    f"{title!r} waits for {text!r}, which never appears: {hidden!r} is a special token, "
                    "which is dropped from the text. Set rollout.keep_special_tokens, or give another form",
                )
            elif cut:
                yield (
                    key,
                    f"{title!r} waits for {text!r}, which never appears: a completion ends before {cut!r} "
                    "(rollout.stop, or a stop id). Let it end elsewhere, or give another form",
                )


def _special_in(text: str, tokenizer: Tokenizer) -> str:
    """The longest special token within ``text``, or ""."""
    return max((token for token in tokenizer.special_tokens if token in text), key=len, default="")


def _tell(config: RunConfig, renderer: Renderer) -> None:
    end, known = renderer.turn_end, renderer.tokenizer.stop_ids
    if end is not None and end.token_id not in known:
        logger.info(
            "the chat template ends a turn with %s, which neither the tokenizer nor the generation config "
            "lists as a stop id: this run stops there too",
            describe(renderer, [end.token_id]),
        )
    elif end is None and not renderer.plain:
        logger.warning(
            "no token that ends an assistant's message was found in the chat template; the stop ids are %s%s",
            describe(renderer, known),
            ", and rows that hold none teach no end" if not config.trains_on_rollouts else "",
        )
