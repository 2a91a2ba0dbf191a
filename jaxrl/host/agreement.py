"""Processes that disagree do not train.

At the start every process states what it was given (``run/agreement.py``), and in every step the checksum of
what it is about to sample from and to learn from. Where two differ, all end with exit code 2 before anything
is computed. The message names what differs and on which process.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.host import distributed

_SHOWN_PROBLEMS = 20
_SHOWN_CHARACTERS = 80
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s\"]+@")


def require_same_facts(facts: Mapping[str, str]) -> None:
    """ConfigError, on every process, that lists the facts which are not the same everywhere."""
    digest = hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()
    if len(set(distributed.exchange(digest))) == 1:
        return
    found = distributed.exchange(dict(facts))
    problems = differences(found, [distributed.name_of(n) for n in range(len(found))])
    if len(problems) > _SHOWN_PROBLEMS:
        more = f"and {len(problems) - _SHOWN_PROBLEMS} more differences"
        problems = [*problems[:_SHOWN_PROBLEMS], ("", more)]
    raise ConfigError(problems)


def require_same(what: str, value: int, values: Sequence[int]) -> None:
    """ConfigError, on every process, unless ``value`` is the same on all.

    Args:
        what: is compared, for the message: "the prompts of step 3".
        value: this process's.
        values: every process's, as ``distributed.gather`` gives them.
    """
    if len(set(map(int, values))) > 1:
        require_same_facts({what: f"checksum {value:08x}"})


def checksum(*columns: Sequence[Any]) -> int:
    """crc32 of columns of numbers or arrays, ragged ones too; None is a value of its own. 0 where there is
    one process, and nothing to compare."""
    if distributed.count() == 1:
        return 0
    found = 0
    for column in columns:
        rows = [None if row is None else np.asarray(row) for row in column]
        kept = [row for row in rows if row is not None]
        sizes = np.array([len(rows), *(-1 if row is None else row.size for row in rows)], np.int64)
        found = zlib.crc32(sizes.tobytes(), found)
        if kept:
            values = np.concatenate([row.ravel() for row in kept])
            found = zlib.crc32(values.tobytes(), zlib.crc32(str(values.dtype).encode(), found))
    return found


def checksum_of(rows: Sequence[Any]) -> int:
    """Checksum of every field of dataclasses, one a row; of a mapping, every value by its name."""
    facts: list[dict[str, Any]] = []
    for row in rows:
        given = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        inner = {f"{n}.{k}": v for n, m in given.items() if isinstance(m, Mapping) for k, v in m.items()}
        facts.append({n: v for n, v in given.items() if not isinstance(v, Mapping)} | inner)
    names = sorted({name for row in facts for name in row})
    columns = ([row.get(name) for row in facts] for name in names)
    return checksum([zlib.crc32(name.encode()) for name in names], *columns)


def differences(
    found: Sequence[Mapping[str, str]], names: Sequence[str], hint: str = "must be the same on every process"
) -> list[tuple[str, str]]:
    """(key, message) for each key whose value is not the same everywhere.

    Args:
        found: what each process states.
        names: of the processes, as messages call them.
        hint: what is needed.
    """
    problems = []
    for key in dict.fromkeys(key for facts in found for key in facts):
        holders = collections.defaultdict(list)
        for number, facts in enumerate(found):
            holders[facts.get(key, "missing")].append(number)
        if len(holders) < 2:
            continue
        # The most common value is probably what was meant; process 0's where none is.
        ranked = sorted(holders, key=lambda value: (-len(holders[value]), holders[value][0]))
        *odd, usual = [*ranked[1:], ranked[0]]
        texts = [f"{_shown(value)} on {_named(holders[value], names)}" for value in odd[:3]]
        more = f" and {len(odd) - 3} other values" if len(odd) > 3 else ""
        usual_text = f"{_shown(usual)} on {_named(holders[usual], names)}"
        problems.append((key, f"{', '.join(texts)}{more}, but {usual_text}; {hint}"))
    return problems


def _shown(value: str) -> str:
    value = _CREDENTIALS.sub("...@", value)
    if len(value) <= _SHOWN_CHARACTERS:
        return value
    return f"{value[:_SHOWN_CHARACTERS]}... (checksum {zlib.crc32(value.encode()):08x})"


def _named(numbers: Sequence[int], names: Sequence[str]) -> str:
    text = ", ".join(names[n] for n in numbers[:3])
    return text if len(numbers) <= 3 else f"{text} and {len(numbers) - 3} more"
