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
from jaxrl.config.errors import ConfigError, RunError, UserCodeError
from jaxrl.config.paths import given_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Command line of a program, read."""

    config: Any
    """The loaded tree."""
    explicit: frozenset[str]
    """Dotted keys that the user set."""
    options: argparse.Namespace
    """The program's own options, ``config`` (the file that was read), ``gin`` and ``overrides``."""


class Parser(argparse.ArgumentParser):
    """The parser of every command: whole names only, each option once, no empty value.

    ``parse_args`` raises ConfigError for what cannot be used.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings, allow_abbrev=False)
        self.given: set[str] = set()
        """Options seen so far, by destination."""
        for name, action in ((None, _Store), ("store", _Store), ("store_true", _StoreTrue)):
            self.register("action", name, action)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


class _Store(argparse._StoreAction):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string:
            _once(parser, self, option_string)
            if isinstance(values, str) and not values.strip():
                raise argparse.ArgumentError(self, "given without a value")
        super().__call__(parser, namespace, values, option_string)


class _StoreTrue(argparse._StoreTrueAction):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _once(parser, self, option_string)
        super().__call__(parser, namespace, values, option_string)


def _once(parser: Any, action: argparse.Action, option: str | None) -> None:
    if action.dest in parser.given:
        raise argparse.ArgumentError(action, f"{option} is given twice; keep one")
    parser.given.add(action.dest)


def parse_cli(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    cls: type,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    find_config: Callable[[argparse.Namespace], str | None] | None = None,
    implied: Sequence[str] = (),
) -> CommandLine:
    """Read ``[--config FILE] [--gin BINDING]... [key=value]...`` and load the config.

    Args:
        argv: the arguments, without the program's name.
        prog: how the program is called, as help prints it.
        description: one or two sentences for --help.
        cls: the root dataclass.
        add_options: adds the program's own options.
        find_config: the file, from the options, where it is not always that of --config.
        implied: see ``load``.

    Raises:
        ConfigError: the arguments or the config cannot be used.
        SystemExit: --help or --help-config, after printing.
    """
    parser = Parser(
        prog=prog,
        description=description,
        epilog="\n".join(["sections:", *section_lines(cls), "", "every key: --help-config"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", type=given_path, help="a .yaml, .yml, .json or .gin file")
    text = "'SectionClass.key = value'; may repeat"
    add("--gin", metavar="BINDING", type=_binding, action="append", default=[], help=text)
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
        if find_config is not None:
            options.config = find_config(options)
        config, explicit = load(cls, options.config, options.overrides, options.gin, implied)
    except ConfigError as error:
        raise ConfigError(strange + error.problems) from None
    if strange:
        raise ConfigError(strange)
    return CommandLine(config=config, explicit=explicit, options=options)


def _binding(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("given without a binding")
    return text


def word_or_config(options: argparse.Namespace) -> str | None:
    """The config file of a command that takes it as a word too: ``COMMAND CONFIG [key=value]...``.

    Raises:
        ConfigError: it is given in both ways.
    """
    words = [word for word in options.overrides if "=" not in word]
    if not words:
        return options.config
    if options.config is not None:
        raise ConfigError(f"{words[0]!r} and --config {options.config} are given; keep one")
    options.overrides.remove(words[0])
    return words[0]


def _unknown_option(word: str, prog: str) -> str:
    key, equals, value = word.lstrip("-").partition("=")
    if "." in key or equals:
        return f"no such option; keys have no dashes, write {key.replace('-', '_')}={value or 'value'}"
    return f"no such option; see {prog} --help"


def run_cli(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Call ``main(argv)`` and return the exit code, with one clear message on stderr for what a user can fix.

    Codes: what main returns (None: 0); 1 for RunError; 2 for ConfigError; 3 for UserCodeError, with the
    traceback of the user's code; 130 when interrupted. Anything else is a bug and propagates.
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
    except RunError as error:
        print(f"{error.title}: {error}", file=sys.stderr)
        return 1
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
