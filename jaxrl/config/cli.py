"""The command line that every program shares, and the exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxrl.config.build import load
from jaxrl.config.docs import describe, section_lines
from jaxrl.config.errors import ConfigError, UserCodeError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What a program was started with."""

    config: Any
    """The loaded tree."""
    explicit: frozenset[str]
    """Dotted keys that the user set."""
    options: argparse.Namespace
    """The program's own options, and ``config`` (the file), ``gin`` and ``overrides`` as written."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse_cli(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    cls: type,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> CommandLine:
    """Read ``[--config FILE] [--gin BINDING]... [key=value]...`` and load the config.

    Args:
        argv: the arguments, without the program's name.
        prog: how the program is called, as help prints it.
        description: one or two sentences for --help.
        cls: the root dataclass.
        add_options: adds the program's own options.

    Raises:
        ConfigError: the arguments or the config cannot be used.
        SystemExit: --help or --help-config, after printing.
    """
    parser = _Parser(
        prog=prog,
        description=description,
        epilog="\n".join(["sections:", *section_lines(cls), "", "every key: --help-config"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a .yaml, .yml, .json or .gin file")
    add(
        "--gin", metavar="BINDING", action="append", default=[], help="'SectionClass.key = value'; may repeat"
    )
    add("--help-config", action="store_true", help="list every key with type, default and meaning")
    add("overrides", metavar="key=value", nargs="*", help="section.key=value, laid over the file")
    if add_options is not None:
        add_options(parser)
    options, rest = parser.parse_known_intermixed_args(list(argv))
    if options.help_config:
        print(describe(cls))
        raise SystemExit(0)
    strange = [(word, _unknown_option(word, prog)) for word in rest]
    config: Any
    try:
        config, explicit = load(cls, options.config, options.overrides, options.gin)
    except ConfigError as error:
        raise ConfigError(strange + error.problems) from None
    if strange:
        raise ConfigError(strange)
    return CommandLine(config=config, explicit=explicit, options=options)


def _unknown_option(word: str, prog: str) -> str:
    key, equals, value = word.lstrip("-").partition("=")
    if "." in key or equals:
        return f"no such option; keys have no dashes, write {key.replace('-', '_')}={value or 'value'}"
    return f"no such option; see {prog} --help"


def run_cli(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Call ``main(argv)`` and return the exit code, with one clear message on stderr for what a user can fix.

    Codes: what main returns (None: 0); 2 for ConfigError; 3 for UserCodeError, with the traceback of the
    user's code; 130 when interrupted. Anything else is a bug and propagates.
    """
    try:
        return main(sys.argv[1:] if argv is None else argv) or 0
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return 2
    except UserCodeError as error:
        if error.__cause__ is not None:
            print(_user_traceback(error.__cause__), end="", file=sys.stderr)
        print(f"error in user code: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _user_traceback(error: BaseException) -> str:
    """The traceback of the user's exception without our frames and the import machinery's."""
    shown = traceback.TracebackException.from_exception(error)
    others = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen importlib")
    kept = [frame for frame in shown.stack if not frame.filename.startswith(others)]
    shown.stack = traceback.StackSummary.from_list(kept or shown.stack)
    return "".join(shown.format())
