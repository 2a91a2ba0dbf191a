"""From a row to ids: prompt templates, conversations, and which tokens of a conversation are learned."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.data import columns, template_dates
from jaxrl.data.columns import Row, fill
from jaxrl.data.config import DataConfig
from jaxrl.data.shown import Shown, printed_object
from jaxrl.data.tokenizer import BUILTIN, Message, Tokenizer
from jaxrl.data.turns import TurnEnd, find_turn_end, first_token


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


class Renderer:
    """Rows to prompts and training rows, by the templates of ``config``.

    Args:
        section: where ``config`` stands in the user's file, for messages.

    Raises:
        ConfigError: no chat template, an unreadable one, variables it does not use, or a system prompt that
            it refuses or leaves out.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, section: str = "data"):
        self.config, self.tokenizer, self.section = config, tokenizer, section
        self.plain = config.chat_template == "none"
        self._shown = Shown()
        # Columnar files fill the keys that other rows have with null, at every depth.
        self._drop_nulls = config.source != "jsonl"
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
                "the tokenizer has no chat template; expected none (plain text) or the path of a jinja file",
                f"{section}.chat_template",
            )
        source = "" if self.plain else self.template or str(tokenizer.hf.chat_template)
        self.prints_date = template_dates.prints_date(source)
        if self.prints_date and config.chat_template_date:
            own = tokenizer.hf.get_chat_template(self.template, tools=[{}] if config.tools else None)
            try:
                self.template = template_dates.fixed(own, config.chat_template_date)
            except ConfigError as error:
                raise ConfigError(error.problems[0][1], f"{section}.chat_template") from None
        variables = dict.fromkeys(config.chat_template_args, "chat_template_args.{}")
        for name, place in {**variables, **({"tools": "tools"} if config.tools else {})}.items():
            if not re.search(rf"\b{re.escape(name)}\b", source):
                raise ConfigError(
                    "has no effect: the chat template never uses it", f"{section}.{place.format(name)}"
                )
        if config.system_prompt:
            system = {"role": "system", "content": config.system_prompt}
            self._render([system, {"role": "user", "content": "a"}], None, add_generation_prompt=True)

    @cached_property
    def turn_end(self) -> TurnEnd | None:
        """Token that ends an assistant's message in the chat template; None for plain text."""
        if self.plain:
            return None

        def render(messages: Sequence[Message]) -> str:
            return self._render(messages, None, add_generation_prompt=False)

        return find_turn_end(render, self.tokenizer, self.config.system_prompt)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a completion: the tokenizer's, and the end of the template's turn."""
        end = () if self.turn_end is None else (self.turn_end.token_id,)
        return tuple(dict.fromkeys(self.tokenizer.stop_ids + end))

    @cached_property
    def answer_opening(self) -> str:
        """The end of a prompt, before the completion: of any prompt by the chat template."""
        if self.plain:
            return self.config.prompt
        try:
            return self._render([{"role": "user", "content": "a"}], None, add_generation_prompt=True)
        except ConfigError:  # the template wants more of a conversation
            return ""

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
            text = self._render(messages, row, add_generation_prompt=True)
            ids = self.tokenizer.encode(text)
        return Prompt(np.array(ids, np.int32), text, row)

    def opening(self, row: Row, text: str) -> list[Message]:
        """The messages of a row's prompt, whose rendered text is ``text``."""
        return [{"role": "user", "content": text}] if self.plain else self.conversation(row)

    def try_roles(self, *roles: str) -> None:
        """Raise ConfigError if the chat template refuses a conversation of these roles, or leaves one out."""
        if not self.plain:
            messages = [{"role": role, "content": "a"} for role in roles]
            self._render(messages, None, add_generation_prompt=True)

    def following(self, messages: Sequence[Message], context: str, row: Row) -> str:
        """Text up to where the assistant's next turn begins: the conversation by the chat template, or in
        plain text ``context`` and what came after the last turn. It need not begin with ``context``, the text
        so far: some templates rewrite earlier messages (strip their reasoning, say).

        Args:
            row: whose prompt began the conversation.

        Raises:
            ConfigError: the template refuses the conversation, or leaves a message out.
        """
        if not self.plain:
            return self._render(messages, row, add_generation_prompt=True)
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
            else self._chat_parts(self.conversation(row, completion=True), row)
        )
        if mask[:1] == [1]:
            raise ConfigError(
                "the prompt has no tokens, so nothing precedes the first one that is learned; expected text, "
                "or a tokenizer that begins a text with BOS",
                f"{self.section}.{'prompt' if self.plain else 'chat_template'}",
            )
        return TrainingRow(np.array(ids, np.int32), np.array(mask, np.float32), row)

    def answered(self, row: Row, answer: str) -> list[int]:
        """Ids of the row's conversation (in plain text, its prompt) with ``answer`` behind it."""
        if self.plain:
            return self.tokenizer.encode_prompt(self.prompt(row).text + answer)
        messages = [*self.conversation(row), {"role": "assistant", "content": answer}]
        return self.tokenizer.encode(self._render(messages, row, add_generation_prompt=False))

    def _plain_parts(self, row: Row) -> tuple[list[int], list[int]]:
        text = fill(self.config.prompt, row, f"{self.section}.prompt")
        prompt = self.tokenizer.encode_prompt(text)
        completion = fill(self.config.completion, row, f"{self.section}.completion")
        answer = self.tokenizer.encode_after(text, completion)
        end = self.tokenizer.eos_id
        if end is None and not self.stop_ids:
            raise ConfigError(
                "neither the tokenizer nor the generation config has an eos token to end a plain text with",
                f"{self.section}.chat_template",
            )
        answer.append(self.stop_ids[0] if end is None else end)
        return prompt + answer, [0] * len(prompt) + [1] * len(answer)

    def _chat_parts(self, messages: Sequence[Message], row: Row) -> tuple[list[int], list[int]]:
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise ConfigError(
                "the conversation has no assistant's message to learn", f"{self.section}.messages"
            )
        text, ids, mask = "", [], []  # type: ignore[var-annotated]
        for turn in turns if self.config.train_on == "all" else turns[-1:]:
            before = self._render(messages[:turn], row, add_generation_prompt=True)
            after = self._render(messages[: turn + 1], row, add_generation_prompt=False)
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
            after += self._end_in_next(messages, turn, row, after)
            answer = self.tokenizer.encode_after(before, after[len(before) :])
            learned = self._learned(answer)
            ids, mask, text = ids + answer, mask + [1] * learned + [0] * (len(answer) - learned), after
        return ids, mask

    def _learned(self, answer: Sequence[int]) -> int:
        """Number of learned tokens of an assistant's part: up to its stop token, not those after it."""
        end = () if self.turn_end is None else (self.turn_end.token_id,)
        for stop_ids in (end, self.stop_ids):
            if stops := [i for i, token in enumerate(answer) if token in stop_ids]:
                return stops[-1] + 1
        return len(answer)

    def _end_in_next(self, messages: Sequence[Message], turn: int, row: Row, text: str) -> str:
        """The end of a turn that the template writes with the message after it. ``text`` is that of the
        conversation up to the turn."""
        end = self.turn_end
        if end is None or not end.opens_next:
            return ""
        if turn + 1 == len(messages):
            return end.text
        longer = self._render(messages[: turn + 2], row, add_generation_prompt=False)
        found = first_token(longer[len(text) :], self.tokenizer) if longer.startswith(text) else None
        if found is None:
            return ""
        token_id, before, token = found
        return before + token if token_id in self.stop_ids and not before.strip() else ""

    def conversation(self, row: Row, *, completion: bool = False) -> list[Message]:
        """The row's messages, with the system prompt before them if they have none.

        Raises:
            ConfigError: as ``columns.fill`` and ``columns.messages``.
        """
        config, section = self.config, self.section
        messages: list[Message] = []
        if config.messages:
            key = f"{section}.messages"
            found = columns.value(row, config.messages, key)
            messages += columns.messages(
                found,
                config.messages,
                key,
                drop_nulls=self._drop_nulls,
                parse_arguments=not self._joins_arguments,
            )
        else:
            messages.append({"role": "user", "content": fill(config.prompt, row, f"{section}.prompt")})
            if completion:
                content = fill(config.completion, row, f"{section}.completion")
                messages.append({"role": "assistant", "content": content})
        if config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return messages

    @cached_property
    def _joins_arguments(self) -> bool:
        """True when the template joins the arguments of a tool call to other text: some want them as JSON."""

        def renders(arguments: dict[str, Any] | str) -> bool:
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "a", "arguments": arguments}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            with contextlib.suppress(ConfigError):
                self._text([{"role": "user", "content": "a"}, turn], add_generation_prompt=False)
                return True
            return False

        return not renders({}) and renders("{}")

    def _text(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> str:
        variables = {**self.config.chat_template_args, **variables}
        return self.tokenizer.render(
            messages, add_generation_prompt=add_generation_prompt, chat_template=self.template, **variables
        )

    def _render(self, messages: Sequence[Message], row: Row | None, *, add_generation_prompt: bool) -> str:
        """The text of a conversation, which shows all of it.

        Raises:
            ConfigError: the template refuses the conversation, leaves a message out, or prints an object.
        """
        tools = {}
        if self.config.tools and row is not None:
            key = f"{self.section}.tools"
            found = columns.value(row, self.config.tools, key)
            tools["tools"] = columns.tools(found, self.config.tools, key, drop_nulls=self._drop_nulls)

        def render(some: Sequence[Message]) -> str:
            return self._text(some, add_generation_prompt=add_generation_prompt, **tools)

        try:
            text = render(messages)
        except ConfigError as error:
            own = f"of the tokenizer {self.tokenizer.folder or BUILTIN}"
            name = own if self.template is None else repr(self.config.chat_template)
            key, why = f"{self.section}.chat_template", f"{error.problems[0][1]} (the template {name})"
            if messages[0]["role"] == "system" and len(messages) > 1:
                with contextlib.suppress(ConfigError):
                    render(messages[1:])
                    key, why = self._source(messages, 0), f"message 0 of the role system: {why}"
            raise ConfigError(why, key) from error.__cause__
        if lost := self._shown.lost(messages, render):
            number, words = lost
            raise ConfigError(
                f"the chat template leaves out {words}; expected a template that shows it, or no such "
                "message",
                self._source(messages, number),
            )
        printed = printed_object([messages, tools.get("tools")], text)
        if printed is not None:
            raise ConfigError(
                f"the chat template prints {str(printed)[:80]} as a Python object; expected text there, or a "
                "template that writes it",
                f"{self.section}.chat_template",
            )
        return text

    def _source(self, messages: Sequence[Message], number: int) -> str:
        """The setting that a message comes from."""
        if self.config.system_prompt and messages[number]["content"] == self.config.system_prompt:
            return f"{self.section}.system_prompt"
        return f"{self.section}.{'messages' if self.config.messages else 'chat_template'}"
