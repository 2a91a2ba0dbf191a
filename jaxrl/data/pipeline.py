"""Prompts for rollouts and rows for supervised training, streamed P at a time."""

from __future__ import annotations

import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.data.chat import Prompt, Renderer, TrainingRow
from jaxrl.data.config import DataConfig
from jaxrl.data.sources import Rows, Settings, open_source
from jaxrl.data.stream import Stream
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.types import Prompts

logger = logging.getLogger("jaxrl")


class Examples:
    """Rows made ready by ``make``, without those that are longer than ``max_tokens``.

    All rows are made once at the start, to find the long ones and every error before a run begins, and again
    when used.

    Args:
        key: the setting that ``max_tokens`` comes from, for messages.

    Raises:
        ConfigError: with the number of the row; or no row is left; or one is longer, with ``overlong``
            "error"; or rows are empty or have nothing to learn.
    """

    def __init__(
        self,
        rows: Rows,
        make: Callable[[Any], Any],
        *,
        max_tokens: int,
        overlong: str,
        key: str,
        section: str = "data",
    ):
        self.rows, self.make, self.section = rows, make, section
        self.fingerprint = 0
        """Checksum of the ids of all rows that are left."""
        kept: list[int] = []
        dropped: list[int] = []
        unusable: dict[tuple[str, str], list[int]] = {}
        next_report = time.monotonic() + 10
        for index in range(len(rows)):
            made = self._made(index)
            if problem := _problem(made, rows.config):
                unusable.setdefault(problem, []).append(index)
            elif len(made.tokens) <= max_tokens:
                kept.append(index)
                self.fingerprint = zlib.crc32(made.tokens.tobytes(), self.fingerprint)
            elif overlong == "error":
                raise ConfigError(
                    f"row {index} has {len(made.tokens)} tokens, more than {key} {max_tokens}; "
                    "raise the limit, or give drop to leave such rows out",
                    f"{section}.overlong",
                )
            else:
                dropped.append(index)
            if time.monotonic() > next_report:
                logger.info("%s: read %d of %d rows", section, index + 1, len(rows))
                next_report += 10
        if unusable:
            raise ConfigError(
                [(f"{section}.{k}", f"{_rows(where)}: {text}") for (k, text), where in unusable.items()]
            )
        self.kept = np.array(kept, np.int64)
        """[n] numbers of the rows that are left."""
        logger.info(
            "%s: dropped %d of %d rows longer than %s %d tokens%s",
            section,
            len(dropped),
            len(rows),
            key,
            max_tokens,
            f": {_rows(dropped)}" if dropped else "",
        )
        if not kept:
            raise ConfigError(f"all {len(rows)} rows are longer than {max_tokens} tokens", key)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Any:
        return self._made(int(self.kept[index]))

    def _made(self, index: int) -> Any:
        row = self.rows[index]
        try:
            return self.make(row)
        except ConfigError as error:
            raise ConfigError(
                [(k, f"row {index}: {text}") for k, text in error.problems]
            ) from error.__cause__


def _problem(made: Prompt | TrainingRow, config: Settings) -> tuple[str, str] | None:
    """(key, message) of a row that nothing can be sampled for or learned from."""
    if isinstance(made, Prompt):
        empty = not len(made.tokens) or not made.text
        key = "messages" if config.messages else "prompt"
        return (key, "the prompt is empty; it must have at least one token") if empty else None
    # No token comes before the first, which therefore is never predicted.
    if not np.any(made.loss_mask[1:]):
        key = "messages" if config.messages else "completion"
        return key, "there is nothing to learn: no token of an answer follows another token"
    return None


def _rows(numbers: Sequence[int]) -> str:
    """Rows by number, the first few where they are many."""
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"rows {', '.join(map(str, numbers[:5]))}{more}"


def prompt_examples(config: DataConfig, tokenizer: Tokenizer, section: str = "data") -> Examples:
    """The prompts of ``config``, in the order of the source; items are ``chat.Prompt``.

    Raises:
        ConfigError, UserCodeError: the source cannot be read, a template does not fit the rows, no row is
            left.
    """
    renderer = Renderer(config, tokenizer, section)
    return Examples(
        open_source(config, section),
        renderer.prompt,
        max_tokens=config.max_prompt_tokens,
        overlong=config.overlong,
        key=f"{section}.max_prompt_tokens",
        section=section,
    )


def load_prompts(
    config: DataConfig, tokenizer: Tokenizer, count: int | None = None, section: str = "data"
) -> Prompts:
    """The first ``count`` prompts (all for None) in the order of the source, numbered from 0: for evaluation.

    Raises: as ``prompt_examples``.
    """
    examples = prompt_examples(config, tokenizer, section)
    size = len(examples) if count is None else min(count, len(examples))
    return _prompts(range(size), [examples[i] for i in range(size)])


class _Resumable:
    """Behaviour of both iterators: they stop and continue with the stream they read from."""

    _stream: Stream

    def get_state(self) -> dict[str, Any]:
        """JSON-able; a new iterator with this state gives the same prompts from here on, ids included."""
        return self._stream.get_state()

    def set_state(self, state: dict[str, Any], strict: bool = True) -> None:
        """Continue from ``state``. When data, templates, tokenizer or seed are not the same: ConfigError, or,
        not ``strict``, a warning."""
        self._stream.set_state(state, strict)

    @property
    def ended(self) -> bool:
        """True when the next one would be empty."""
        return self._stream.ended

    def close(self) -> None:
        """Stop worker processes; using the iterator again starts them."""
        self._stream.close()


class PromptIterator(_Resumable):
    """P prompts at a time. Batches run across epochs; with finite epochs the very last may be smaller.

    Raises: as ``prompt_examples``.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, seed: int, section: str = "data"):
        self.examples = prompt_examples(config, tokenizer, section)
        self._stream = _stream(self.examples, config, seed, section)
        self._count = config.prompts_per_step

    def __iter__(self) -> PromptIterator:
        return self

    def __next__(self) -> Prompts:
        prompts = self.take_more(self._count)
        if not len(prompts):
            raise StopIteration
        return prompts

    def take_more(self, count: int) -> Prompts:
        """The next ``count`` prompts of the same stream; fewer, down to none, when the last epoch ends."""
        start = self._stream.position
        items = self._stream.read(count)
        return _prompts(range(start, start + len(items)), items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """P rows of supervised training (host side)."""

    ids: Sequence[int]
    """[P] number of each row in the stream of the run."""
    tokens: Sequence[np.ndarray]
    """[P] ragged int32, prompt and answer."""
    loss_mask: Sequence[np.ndarray]
    """[P] ragged float32: 1 at the tokens that are learned."""

    def __len__(self) -> int:
        return len(self.tokens)


class SftIterator(_Resumable):
    """P rows of supervised training at a time; stream and state as those of ``PromptIterator``.

    Args:
        max_tokens: longest row, prompt and answer together; longer ones are dropped or refused as ``config``
            says.
        max_tokens_key: the setting it comes from, for messages.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        seed: int,
        max_tokens: int,
        section: str = "data",
        max_tokens_key: str = "batch.row_tokens",
    ):
        self.examples = Examples(
            open_source(config, section),
            Renderer(config, tokenizer, section).training_row,
            max_tokens=max_tokens,
            overlong=config.overlong,
            key=max_tokens_key,
            section=section,
        )
        self._stream = _stream(self.examples, config, seed, section)
        self._count = config.prompts_per_step

    def __iter__(self) -> SftIterator:
        return self

    def __next__(self) -> TrainingRows:
        start = self._stream.position
        items: list[TrainingRow] = self._stream.read(self._count)
        if not items:
            raise StopIteration
        return TrainingRows(
            ids=range(start, start + len(items)),
            tokens=[item.tokens for item in items],
            loss_mask=[item.loss_mask for item in items],
        )


def _stream(examples: Examples, config: DataConfig, seed: int, section: str) -> Stream:
    return Stream(
        examples,
        seed=seed,
        shuffle=config.shuffle,
        epochs=config.epochs,
        workers=config.workers,
        ahead=2 * config.prompts_per_step,
        section=section,
    )


def _prompts(ids: Sequence[int], items: Sequence[Prompt]) -> Prompts:
    return Prompts(
        ids=ids,
        tokens=[item.tokens for item in items],
        texts=[item.text for item in items],
        examples=[item.example for item in items],
    )
