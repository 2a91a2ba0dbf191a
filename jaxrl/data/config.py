"""The ``data`` section: which rows, how they become prompts or training rows, and in which order."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from jaxrl.config import ConfigError, factory, setting
from jaxrl.data import columns, sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Rows of a source, rendered by a prompt template and a chat template, streamed P at a time."""

    source: str = setting(
        "arithmetic",
        "arithmetic, gsm8k, jsonl, parquet, hf, or the import path of a function (pkg.module:name or "
        "file.py:name) that returns rows: anything with __len__ and __getitem__(i) -> dict. It is called "
        "with path and split, where they are given, and with the options",
    )
    path: str | None = setting(
        None,
        "file, or glob pattern of files read in the order of their names; the dataset's name for source: hf",
        path=True,
    )
    split: str | None = setting(None, "split of a source that has some, for example train or test")
    options: dict[str, Any] = factory(dict, "further options of the source, by name")
    limit: int | None = setting(None, "use at most this number of rows, the first ones; null: all")

    prompt: str = setting(
        "{question}",
        "the user's message; {column} is replaced by a column of text or numbers, {{ and }} stand for "
        "braces, a lone {} stays. A dot leads into a nested column, here and in every setting that names "
        "one: {extra_info.question}",
    )
    completion: str = setting(
        "{answer}", "the assistant's message in supervised training, a template like prompt"
    )
    messages: str | None = setting(
        None, "column with the conversation, a list of {role, content}, used instead of prompt and completion"
    )
    tools: str | None = setting(
        None,
        "column with the tools of a conversation, a list of JSON schemas or JSON of one, for the template",
    )
    train_on: Literal["all", "last"] = setting(
        "all", "supervised training: which assistant messages of a conversation are learned"
    )
    system_prompt: str | None = setting(None, "system message of conversations that bring none")
    chat_template: str = setting(
        "auto",
        "auto: the tokenizer's own; none: plain text after the tokenizer's BOS; or the path of a jinja file",
        path=True,
    )
    chat_template_args: dict[str, Any] = factory(
        dict, "variables of the chat template, for example enable_thinking"
    )
    chat_template_date: str | None = setting(
        None,
        "date (YYYY-MM-DD) for chat templates that print today's; null: the day on which the run starts, "
        "kept in its checkpoints",
    )

    max_prompt_tokens: int = setting(512, "longest prompt, in the very tokens that are sent to the sampler")
    overlong: Literal["drop", "error"] = setting("drop", "what happens to rows that are longer")

    prompts_per_step: int = setting(8, "prompts of one step (P); in supervised training, rows of one step")
    shuffle: bool = setting(True, "a new order in every epoch; false: the order of the source")
    epochs: int | None = setting(None, "passes over the rows; null: endless")
    workers: int = setting(
        0, "processes that prepare rows ahead; 0: one thread of this process. The order is the same"
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        yield from sources.problems(self)
        for name in ("prompts_per_step", "max_prompt_tokens", "epochs", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield name, f"{value}: needs at least 1"
        if self.chat_template_date is not None:
            try:
                datetime.date.fromisoformat(self.chat_template_date)
            except ValueError:
                yield "chat_template_date", f"{self.chat_template_date!r} must be a date such as 2026-01-31"
        if self.workers < 0:
            yield "workers", f"{self.workers}: needs 0 or a number of processes"
        if self.chat_template == "none":
            for name in ("system_prompt", "chat_template_args", "messages", "tools"):
                if getattr(self, name):
                    yield name, "has no effect with chat_template: none, which sends the prompt as plain text"
        elif self.chat_template != "auto" and not Path(self.chat_template).expanduser().is_file():
            yield "chat_template", f"{self.chat_template!r} is neither auto, none nor a file that exists"
        for name in ("prompt", "completion", "system_prompt", "chat_template_args"):
            try:
                columns.plain(getattr(self, name), "it", name)
            except ConfigError as error:
                yield from error.problems
        if self.tools and "tools" in self.chat_template_args:
            yield "tools", "is set in chat_template_args too; expected one of them"
        if not self.messages:
            for name in ("prompt", "completion"):
                if not getattr(self, name):
                    yield name, "is empty; expected a template with columns, for example '{question}'"
