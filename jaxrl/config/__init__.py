"""Config: YAML or gin files and command line overrides become one tree of frozen dataclasses.

This package knows no setting of ours. A section is a frozen keyword-only dataclass that lives beside the code
that reads it; it declares each key with ``setting``, ``required``, ``factory`` or ``variants``, and may
define three hooks:

``presets(cls, given: dict) -> dict`` (classmethod)
    Defaults that depend on what was given, by field name.
``problems(self) -> Iterable[tuple[str, str]]``
    (key relative to the section, message) for each value that has the right type and still cannot work.
``dead_options(self, explicit: frozenset[str]) -> Iterable[tuple[str, str]]``
    The same for keys that the user set (``explicit``, relative to the section) and that have no effect here.

``load`` lists every problem of a config in one ``ConfigError``, each as
``key: what was given; what is needed (where it was written)``.
"""

from jaxrl.config.build import from_dict, load, to_yaml
from jaxrl.config.cli import CommandLine, Parser, parse_cli, run_cli, word_or_config
from jaxrl.config.docs import describe, markdown
from jaxrl.config.errors import ConfigError, RunError, UserCodeError, nearest
from jaxrl.config.fields import Variants, factory, required, setting, to_dict, variants
from jaxrl.config.imports import import_by_path, mistyped
from jaxrl.config.paths import file_problem, folder_problem, given_file, given_path, path_problem

__all__ = [
    "CommandLine",
    "ConfigError",
    "Parser",
    "RunError",
    "UserCodeError",
    "Variants",
    "describe",
    "factory",
    "file_problem",
    "folder_problem",
    "from_dict",
    "given_file",
    "given_path",
    "import_by_path",
    "load",
    "markdown",
    "mistyped",
    "nearest",
    "parse_cli",
    "path_problem",
    "required",
    "run_cli",
    "setting",
    "to_dict",
    "to_yaml",
    "variants",
    "word_or_config",
]
