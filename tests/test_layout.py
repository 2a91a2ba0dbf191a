"""The layout of the package: imports point down, no circles, small files and functions."""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LAYERS = (
    {"ops", "config"},
    {"models", "mesh", "host", "store", "types"},
    {"compile"},
    {"learn", "rollout", "rewards", "environments", "workers", "data", "record"},
    {"recipes"},
    {"run"},
    {"planner"},
)
"""Packages from the bottom up: one imports those of its own layer and of the layers below it. The modules
beside them are commands, which import all of them and are imported by none."""
ON_THEIR_OWN = {"ops", "config"}
"""They import nothing of ours."""
OPTIONAL = {"datasets", "gcsfs", "jetstream", "libtpu", "pathwaysutils", "qwix", "ray", "wandb"}
"""Packages of the extras, imported where they are used."""
HEAVY = {
    *("etils", "orbax", "grain", "transformers", "huggingface_hub"),
    *("math_verify", "sympy", "matplotlib", "tensorboardX", "gin"),
}
"""Required packages that take a good part of a second to import, and that not every process uses."""
BEHIND_A_PACKAGE = {"jaxrl.rollout.jetstream"}
"""Our modules that need an optional package to be imported at all."""

# To be mended: each set may only shrink, and an entry that is no longer needed fails the test.
UPWARD: set[str] = set()
CIRCLES: set[frozenset[str]] = set()
LATE: set[str] = set()
LONG: set[str] = set()


class Module:
    """A module of ours: its name, its text and the imports in it."""

    def __init__(self, path: pathlib.Path):
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.path = path
        self.text = path.read_text()
        self.tree = ast.parse(self.text)

    @property
    def package(self) -> str:
        """The part of the tree it belongs to: a package, or the name of a command."""
        return (*self.name.split("."), "")[1]

    def imports(self, nodes) -> set[str]:
        """Full names that the import statements among ``nodes`` name; a module of ours by its own name."""
        found = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, f"{self.path}:{node.lineno}: a relative import"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in names() else node.module for name in inner}
        return found

    @functools.cached_property
    def ours(self) -> set[str]:
        """Modules of ours that it imports, in functions and for the type checker too."""
        return {name for name in self.imports(ast.walk(self.tree)) if name in names()} - {self.name}

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@functools.cache
def names() -> frozenset[str]:
    paths = (ROOT / "jaxrl").rglob("*.py")
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    return frozenset(".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts)


@functools.cache
def modules() -> dict[str, Module]:
    found = [Module(path) for path in sorted((ROOT / "jaxrl").rglob("*.py"))]
    return {module.name: module for module in found}


def layer(package: str) -> int:
    """Number of its layer; commands are above all."""
    return next((i for i, layer in enumerate(LAYERS) if package in layer), len(LAYERS))


def circles() -> set[frozenset[str]]:
    """Sets of modules that import each other, however indirectly (Tarjan's components of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in modules()[name].ours:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.add(frozenset(component))

    for name in modules():
        if name not in index:
            visit(name)
    return found


def assert_only(found: set, known: set) -> None:
    """``found`` are the exceptions that are ``known``, no more and no fewer."""
    assert not found - known, f"new: {sorted(map(str, found - known))}"
    assert not known - found, f"mended, strike it from the list: {sorted(map(str, known - found))}"


def test_every_package_has_its_layer():
    packages = {module.package for module in modules().values() if module.name.count(".") > 1}
    assert packages | {"types"} == set().union(*LAYERS)


def test_imports_point_down():
    upward = set()
    for module in modules().values():
        if module.name == "jaxrl":
            continue
        for other in (modules()[name] for name in module.ours):
            above = layer(other.package) > layer(module.package)
            command = layer(other.package) == len(LAYERS)
            alone = module.package in ON_THEIR_OWN and other.package != module.package
            if above or command or alone:
                upward.add(f"{module.name} -> {other.name}")
    assert_only(upward, UPWARD)


def test_no_circles():
    assert_only(circles(), CIRCLES)


def test_functions_import_optional_and_heavy_packages_only():
    late = set()
    for module in modules().values():
        for function in module.functions:
            for name in module.imports(ast.walk(function)):
                top = name.partition(".")[0]
                kernel = module.package == "ops" and name.startswith("jaxrl.ops.") and name.endswith("_tpu")
                if top not in OPTIONAL | HEAVY and name not in BEHIND_A_PACKAGE and not kernel:
                    late.add(f"{module.name} -> {name}")
    assert_only(late, LATE)


def test_optional_packages_are_those_of_the_extras_and_heavy_ones_are_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = " ".join(project["dependencies"]).lower().replace("-", "_")
    extras = " ".join(map(" ".join, project["optional-dependencies"].values())).lower().replace("-", "_")
    for name in OPTIONAL - {"libtpu"}:  # jax[tpu] brings it
        assert name in extras and name not in required
    for name in HEAVY:
        assert name.lower() in required


def test_files_and_functions_are_small():
    long = set()
    for module in modules().values():
        if len(module.text.splitlines()) > 500:
            long.add(module.name)
        if module.package == "ops" and "_tpu" in module.name:
            continue  # bodies of kernels
        for function in module.functions:
            assert function.end_lineno is not None
            if function.end_lineno - function.lineno >= 80:
                long.add(f"{module.name}.{function.name}")
    assert_only(long, LONG)


def test_commands_are_few_and_short():
    beside = [module for module in modules().values() if module.name.count(".") == 1]
    single = [module for module in beside if module.path.name != "__init__.py"]
    assert len(single) <= 10
    for module in single:
        if module.name != "jaxrl.types":
            assert len(module.text.splitlines()) <= 80, module.name


def test_no_module_is_called_utils():
    parts = collections.Counter(part for name in modules() for part in name.split("."))
    assert not {"utils", "util", "common", "helpers", "misc"} & set(parts)


@pytest.mark.parametrize("folder", sorted(set().union(*LAYERS) - {"types"}))
def test_tests_mirror_the_package(folder):
    assert list((ROOT / "tests" / folder).glob("test_*.py"))


def test_the_path_of_a_reader_is_short_and_its_line_counts_are_true():
    section = (
        (ROOT / "CONTRIBUTING.md").read_text().split("## What one GRPO step does\n")[1].split("\n## ")[0]
    )
    path = {file: int(lines) for file, lines in re.findall(r"\| `(jaxrl/\S+\.py)` \| (\d+) \|", section)}
    found = {file: len((ROOT / file).read_text().splitlines()) for file in path}
    assert len(path) <= 7 and sum(found.values()) <= 1800
    assert found == pytest.approx(path, rel=0.1)
