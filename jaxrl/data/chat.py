"""From a row to ids: prompt templates, conversations, and which tokens of a conversation are learned."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import ConfigError, nearest
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import Message, Tokenizer

Row = Mapping[str, Any]
_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row as a prompt."""

    tokens: np.ndarray
    """[T] int32: what is sent to the sampler."""
    text: str
    example: Row


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """One row of supervised training."""

    tokens: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] float32: 1 at what is learned, an assistant's message and the stop token that ends it."""
    example: Row


def fill(template: str, row: Row, key: str) -> str:
    """``template`` with {column} replaced by the row's value; {{ and }} stand for braces, other braces stay.

    Raises:
        ConfigError: the row has no such column, or a null in it; names the columns there are.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0)[0]
        if name not in row:
            hint = nearest(name, row)
            raise ConfigError(
                f"there is no column {name!r}"
                + (f"; did you mean {hint!r}?" if hint else "")
                + f" The columns are {', '.join(map(str, row))}",
                key,
            )
        if row[name] is None:
            raise ConfigError(f"column {name!r} is null", key)
        return str(row[name])

    return _FIELD.sub(value, template)


class Renderer:
    """Rows to prompts and training rows, by the templates of ``config``.

    Args:
        section: where ``config`` stands in the user's file, for messages.

    Raises:
        ConfigError: no chat template, an unreadable one, or variables it does not use.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, section: str = "data"):
        self.config, self.tokenizer, self.section = config, tokenizer, section
        self.plain = config.chat_template == "none"
        self.template: str | None = None
        if config.chat_template not in ("auto", "none"):
            try:
                self.template = Path(config.chat_template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{config.chat_template!r} cannot be read: {error}", f"{section}.chat_template"
                ) from None
        if config.chat_template == "auto" and not tokenizer.has_chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; needed is none (plain text) or the path of a jinja file",
                f"{section}.chat_template",
            )
        source = self.template or str(tokenizer.hf.chat_template)
        for name in config.chat_template_args:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                raise ConfigError(
                    "has no effect: the chat template never uses it", f"{section}.chat_template_args.{name}"
                )

    def prompt(self, row: Row) -> Prompt:
        """The row as a prompt, up to where the assistant's answer begins.

        Raises:
            ConfigError: a missing column, or a conversation the template refuses.
        """
        if self.plain:
            text = fill(self.config.prompt, row, f"{self.section}.prompt")
            ids = self.tokenizer.encode_prompt(text)
        else:
            messages = self.conversation(row)
            if messages[-1].get("role") == "assistant":
                raise ConfigError(
                    "the conversation ends with the assistant's message; a prompt has to end before it",
                    f"{self.section}.messages",
                )
            text = self._render(messages, add_generation_prompt=True)
            ids = self.tokenizer.encode(text)
        return Prompt(np.array(ids, np.int32), text, row)

    def opening(self, row: Row, text: str) -> list[Message]:
        """The messages of a row's prompt, whose rendered text is ``text``."""
        return [{"role": "user", "content": text}] if self.plain else self.conversation(row)

    def following(self, messages: Sequence[Message], context: str) -> str:
        """Text up to where the assistant's next turn begins: the conversation by the chat template, or in
        plain text ``context`` and what came after the last turn. It need not begin with ``context``, the text
        so far: some templates rewrite earlier messages (strip their reasoning, say).

        Raises:
            ConfigError: the template refuses the conversation.
        """
        if not self.plain:
            return self._render(messages, add_generation_prompt=True)
        turn = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return context + "".join(message["content"] for message in messages[turn + 1 :])

    def training_row(self, row: Row) -> TrainingRow:
        """The row with the assistant's tokens marked.

        A conversation is cut where each of the assistant's messages begins, as the template's generation
        prompt has it, and the parts are tokenized so that every message follows the very ids a sampler would
        have been given.

        Raises:
            ConfigError: a missing column, no assistant's message, or a template that cannot be cut this way:
                one that rewrites earlier messages (strips their reasoning, say), or whose generation prompt
                is not how it begins an assistant's message.
        """
        ids, mask = (
            self._plain_parts(row)
            if self.plain
            else self._chat_parts(self.conversation(row, completion=True))
        )
        return TrainingRow(np.array(ids, np.int32), np.array(mask, np.float32), row)

    def _plain_parts(self, row: Row) -> tuple[list[int], list[int]]:
        text = fill(self.config.prompt, row, f"{self.section}.prompt")
        prompt = self.tokenizer.encode_prompt(text)
        completion = fill(self.config.completion, row, f"{self.section}.completion")
        answer = self.tokenizer.encode_after(text, completion)
        if self.tokenizer.eos_id is None:
            raise ConfigError(
                "the tokenizer has no eos token to end a plain text with", f"{self.section}.chat_template"
            )
        answer.append(self.tokenizer.eos_id)
        return prompt + answer, [0] * len(prompt) + [1] * len(answer)

    def _chat_parts(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise ConfigError(
                "the conversation has no assistant's message to learn", f"{self.section}.messages"
            )
        text, ids, mask = "", [], []  # type: ignore[var-annotated]
        for turn in turns if self.config.train_on == "all" else turns[-1:]:
            before = self._render(messages[:turn], add_generation_prompt=True)
            after = self._render(messages[: turn + 1], add_generation_prompt=False)
            if not before.startswith(text):
                raise ConfigError(
                    "the chat template rewrites earlier messages when later ones follow, so one row "
                    "cannot train all of them as they were sampled; set it to last, or split the rows",
                    f"{self.section}.train_on",
                )
            if not after.startswith(before):
                raise ConfigError(
                    "the chat template's generation prompt is not how it begins an assistant's message: "
                    f"{before[-60:]!r} against {after[max(0, len(before) - 60) :][:120]!r}",
                    f"{self.section}.chat_template",
                )
            context = self.tokenizer.encode_after(text, before[len(text) :])
            ids, mask = ids + context, mask + [0] * len(context)
            answer = self.tokenizer.encode_after(before, after[len(before) :])
            learned = _learned(answer, self.tokenizer.stop_ids)
            ids, mask, text = ids + answer, mask + [1] * learned + [0] * (len(answer) - learned), after
        return ids, mask

    def conversation(self, row: Row, *, completion: bool = False) -> list[Message]:
        config, section = self.config, self.section
        if config.messages:
            messages = _checked(row, config.messages, f"{section}.messages")
        else:
            messages = [{"role": "user", "content": fill(config.prompt, row, f"{section}.prompt")}]
            if completion:
                content = fill(config.completion, row, f"{section}.completion")
                messages.append({"role": "assistant", "content": content})
        if config.system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return messages

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                chat_template=self.template,
                **self.config.chat_template_args,
            )
        except ConfigError as error:
            raise ConfigError(error.problems[0][1], f"{self.section}.chat_template") from error.__cause__


def _learned(answer: Sequence[int], stop_ids: Sequence[int]) -> int:
    """How many tokens of an assistant's part are learned: up to its stop token, not what follows it."""
    stops = [i for i, token in enumerate(answer) if token in stop_ids]
    return stops[-1] + 1 if stops else len(answer)


def _checked(row: Row, column: str, key: str) -> list[Message]:
    if column not in row:
        raise ConfigError(f"there is no column {column!r}. The columns are {', '.join(map(str, row))}", key)
    messages = row[column]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, Mapping) and "role" in m for m in messages)
    ):
        raise ConfigError(
            f"column {column!r} holds {repr(messages)[:80]}; needed is a list of messages {{role, content}}",
            key,
        )
    # Columnar files fill the keys that other messages have with null.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]
