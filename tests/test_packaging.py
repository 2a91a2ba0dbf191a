"""What is shipped, what it asks for, and that the base install is enough."""

import ast
import email
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "tpu",
    "cuda",
    "jetstream",
    "int8",
    "ray",
    "gcs",
    "wandb",
    "pathways",
    "hf",
    "test",
    "integration",
    "dev",
}

# Import name -> extra, of what may be imported where it is used but never by a run that does not ask for it.
OPTIONAL_MODULES = {
    "datasets": "hf",
    "gcsfs": "gcs",
    "jetstream": "jetstream",
    "qwix": "int8",
    "pathwaysutils": "pathways",
    "ray": "ray",
    "wandb": "wandb",
}
# Nothing of ours uses it, but Orbax and JetStream know it. (No torch: transformers takes what is there.)
NEVER_NEEDED = ["tensorflow"]


def names(requirements):
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def git_files():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    return [ROOT / name for name in listing.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, ROOT], check=True, capture_output=True, text=True)
    (path,) = folder.glob("jaxrl-*.whl")
    return path


@pytest.fixture(scope="module")
def base_install(tmp_path_factory, wheel):
    """Environment variables of a process that sees the wheel, not the checkout, with trip wires for extras.

    Each trip wire is a module that writes its name into the file EXTRAS_LOG and then cannot be imported.
    """
    folder = tmp_path_factory.mktemp("base")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    for name in [*OPTIONAL_MODULES, *NEVER_NEEDED]:
        package = folder / "wires" / name.replace(".", "/")
        package.mkdir(parents=True)
        code = (
            f"import os\nopen(os.environ['EXTRAS_LOG'], 'a').write('{name} ')\nraise ImportError('{name}')\n"
        )
        (package / "__init__.py").write_text(code)
    log = folder / "imported"
    log.touch()
    path = os.pathsep.join([str(folder / "site"), str(folder / "wires")])
    return os.environ | {"PYTHONPATH": path, "EXTRAS_LOG": str(log), "JAX_PLATFORMS": "cpu"}


def run_base(environment, folder, *arguments):
    """Run Python in ``folder`` on the base install; returns its output and the extras it tried to import."""
    log = pathlib.Path(environment["EXTRAS_LOG"])
    log.write_text("")
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, log.read_text().split()


def test_wheel_contains_the_package_and_the_configs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        members = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for path in git_files() if path.exists()}
    package = {str(path) for path in files if path.parts[0] == "jaxrl"}
    configs = {f"jaxrl/{path}" for path in files if path.parts[0] == "configs"}
    assert {"jaxrl/__init__.py", "jaxrl/configs/quickstart.yaml"} <= package | configs <= members
    kinds = {path.rsplit("/", 1)[-1].rsplit(".", 1)[-1] for path in members}
    assert kinds <= {"py", "json", "yaml", "gin", "typed"}
    assert "jaxrl/models/shapes/qwen3_8b.json" in members
    assert not [name for name in members if not name.startswith("jaxrl/") or "test" in name]


def test_wheel_states_licence_pythons_and_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS


@pytest.mark.parametrize("program", ["train", "evaluate", "export", "report"])
def test_help_works_on_the_base_install_and_imports_no_extra(base_install, tmp_path, program):
    output, extras = run_base(base_install, tmp_path, "-m", f"jaxrl.{program}", "--help")
    assert "usage:" in output
    assert extras == []


@pytest.mark.slow
def test_a_run_works_on_the_base_install_and_imports_no_extra(base_install, tmp_path):
    """From a shipped config: training with evaluation, checkpoint and report."""
    environment = {key: value for key, value in base_install.items() if key != "XLA_FLAGS"}
    config = next(
        pathlib.Path(base_install["PYTHONPATH"].split(os.pathsep)[0]).glob("jaxrl/configs/quickstart.yaml")
    )
    settings = ["init_from=null", "steps=1", "eval.limit=8", "data.prompts_per_step=4", "rewards.workers=1"]
    _, extras = run_base(environment, tmp_path, "-m", "jaxrl.train", "--config", str(config), *settings)
    assert extras == []
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


def imports(path):
    """Top-level names of the modules that a source file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_every_import_of_the_package_is_a_declared_dependency():
    distributions = importlib.metadata.packages_distributions()
    base = names(PROJECT["dependencies"])
    undeclared = set()
    for path in (ROOT / "jaxrl").rglob("*.py"):
        for module in imports(path):
            top = module.split(".")[0]
            if top == "jaxrl" or top in sys.stdlib_module_names:
                continue
            if any(module == name or module.startswith(f"{name}.") for name in OPTIONAL_MODULES):
                continue
            if not base & {canonicalize_name(name) for name in distributions.get(top, [])}:
                undeclared.add((str(path.relative_to(ROOT)), module))
    assert undeclared == set()


def test_optional_modules_belong_to_an_extra():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == EXTRAS
    assert set(OPTIONAL_MODULES.values()) <= EXTRAS
    heavy = {"datasets", "gcsfs", "google-jetstream", "pathwaysutils", "ray", "tensorflow", "torch", "wandb"}
    assert not heavy & names(PROJECT["dependencies"])


def pinned(lock, environment):
    """Versions by name that a lock file gives one Python."""
    pins = {}
    for line in (ROOT / lock).read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(environment):
            (version,) = pin.specifier
            assert version.operator == "=="
            assert pins.setdefault(canonicalize_name(pin.name), version.version) == version.version
    return pins


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_locks_pin_every_dependency_for_each_python(python):
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    environment |= {"platform_machine": "x86_64", "platform_python_implementation": "CPython"}
    pins = pinned("requirements.lock", environment)
    more = pinned("requirements-integration.lock", environment)

    def check(pins, *extras):
        extras = [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
        for requirement in map(Requirement, PROJECT["dependencies"] + extras):
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement

    check(pins, "test", "dev")
    check(more, "test", "dev", "integration")
    assert pins["jax"].startswith("0.10" if python == "3.11" else "0.12")
    assert not pins.keys() & {"torch", "tensorflow", "datasets", "ray", "wandb", "libtpu"}
    assert pins.items() <= more.items() and "libtpu" in more


def test_repository_names_no_package_index_and_no_folder_of_a_machine():
    parts = [
        ("py", "pi.org"),
        ("python", "hosted"),
        ("--index", "-url"),
        ("/opt/", "pypi"),
        ("/root", "/"),
        ("/tmp", "/w/"),
    ]
    forbidden = re.compile("|".join(re.escape(a + b) for a, b in parts))
    found = []
    for path in git_files():
        try:
            text = path.read_text() if path.is_file() else ""
        except UnicodeDecodeError:
            continue
        found += [(path.relative_to(ROOT), match.group()) for match in forbidden.finditer(text)]
    assert found == []
