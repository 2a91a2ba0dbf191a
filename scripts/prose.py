"""Check the English of documents, docstrings, comments and messages against the project's rules.

    python scripts/prose.py [FILE ...]

No word of ``WORDS`` is used. A docstring starts with a verb or a noun. In a document a sentence has at most
25 words, and a line of its own. proselint's checks for doubled, misused and misspelt words run too. The exit
code is 1 where anything is found.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from proselint.checks import __register__ as proselint_checks
from proselint.registry.checks import Check, engine, types

ROOT = Path(__file__).resolve().parents[1]
FILES = ("*.md", "docs/*.md", "deploy/**/*.md", "jaxrl/**/*.py")
GENERATED = {ROOT / "docs" / "config.md"}
MOST_WORDS = 25
FIRST_WORDS = ("What", "Whether", "Of", "How")
"""Words that no docstring starts with."""
WORDS = {
    r"so many": "as many, or the number",
    r"needed (?:is|are)": "expected ..., got ...; or must be",
    r"(?<!there )is no (?!longer\b|more\b|less\b|\w+er\b)[a-z]+": "is not a",
    r"(?:sees|see|seen) to it": "makes sure, or the plain verb",
    r"(?:is|are|was|were|be|been|being) (?:not |already )?there(?! (?:is|are|was|were)\b)": "exists",
    r"what is left": "the rest",
    r"booked": "reserved",
}
"""Pattern -> what to write instead."""
PROSELINT = (
    *("cliches", "lexical_illusions", "malapropisms", "misc.back_formations", "misc.illogic", "misc.many_a"),
    *("mondegreens", "needless_variants", "nonwords", "oxymorons", "redundancy", "spelling", "terms"),
)
"""Checks of proselint's that suit technical prose."""
CODE = "Code"
"""Stands for a piece of code in prose."""


class Passage(NamedTuple):
    """Prose, and where it starts."""

    line: int
    text: str
    is_document: bool = False
    is_docstring: bool = False


def word_list() -> list[Check]:
    """``WORDS`` as checks of proselint's kind."""
    return [
        Check(
            check_type=types.ExistenceSimple(pattern=rf"\b(?:{pattern})\b"),
            engine=engine.Fancy(),
            message=f"'{{}}': {advice}",
        )
        for pattern, advice in WORDS.items()
    ]


def plain(text: str) -> str:
    """Prose without code, addresses, emphasis and marks of lists."""
    text = re.sub(r"``[^`]*``|`[^`]*`|https?://\S+", CODE, text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(?:-\s+)?\*\*[^*]+[.:]\*\*", "", text)
    text = re.sub(r"(?<!\w)[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}(?!\w)", "", text)
    return re.sub(r"^\s*(?:[-*>#]+\s+)?(?:\d+\.\s+)?", "", text)


def sentences(text: str) -> list[str]:
    """Sentences of a plain passage."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split()))


def document(text: str) -> Iterator[Passage]:
    """Lines of a Markdown file; blocks of code and tables are left out."""
    in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_block = not in_block
        elif not in_block and line.strip() and not re.match(r" {4}|\s*\|", line):
            yield Passage(number, plain(line), is_document=True)


def source(text: str) -> Iterator[Passage]:
    """Docstrings, comments and texts of at least three words in a Python file."""
    docstrings = set()
    for node in ast.walk(tree := ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
            if isinstance(node.value.value, str):
                yield Passage(node.lineno, node.value.value, is_docstring=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            if node.value.count(" ") >= 2:
                yield Passage(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(token.start[0], token.string.lstrip("# "))


def problems(passage: Passage, checks: Iterable[Check]) -> Iterator[str]:
    """Messages about a passage."""
    text = passage.text if passage.is_document else plain(passage.text)
    for check in checks:
        if check.path and not (passage.is_document or passage.is_docstring):
            continue  # a message may be markup
        for result in check.check(f" {text} "):
            yield result.message
    if passage.is_docstring and (first := (text.split() or [""])[0]) in FIRST_WORDS:
        yield f"'{first}': a docstring starts with a verb or a noun"
    if passage.is_document:
        found = sentences(text)
        if len(found) > 1:
            yield f"{len(found)} sentences in a line"
        for sentence in found:
            if (count := len(re.findall(r"[\w'.-]*\w[\w'.-]*", sentence))) > MOST_WORDS:
                yield f"a sentence of {count} words: {sentence[:60]}..."


def main(names: list[str]) -> int:
    """Print a line for each problem of the files, by default of all. Returns 1 where one is found."""
    files = [Path(name) for name in names]
    files = files or [p for pattern in FILES for p in sorted(ROOT.glob(pattern)) if p not in GENERATED]
    checks = [c for c in proselint_checks if any(c.matches_partial(name) for name in PROSELINT)]
    checks += word_list()
    found = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        for passage in sorted((document if file.suffix == ".md" else source)(text)):
            for message in problems(passage, checks):
                print(f"{file.resolve().relative_to(ROOT)}:{passage.line}: {message}")
                found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
