"""scripts/setup.sh on machines that lack something, played by stub programs that log their calls."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-integration.lock")
STUB_PYTHON = """#!/bin/bash
echo "python $*" >>"$LOG"
case "$*" in
    *version_info*) echo "$STUB_VERSION" ;;
    *ensurepip*) [ -e "$STUB_VENV" ] ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"install"*) exit "$STUB_PIP_EXIT" ;;
esac
"""
STUB_APT = """#!/bin/bash
echo "apt-get $*" >>"$LOG"
[ "$1" = update ] || touch "$STUB_VENV"
"""


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Machine:
    """A checkout and a PATH with stub programs; attributes say what the machine has."""

    def __init__(self, folder):
        self.folder, self.log = folder / "checkout", folder / "log"
        (self.folder / "scripts").mkdir(parents=True)
        for name in ("scripts/setup.sh", *LOCKS, "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("bash", "cat", "cp", "dirname", "mkdir", "sha256sum", "touch"):
            (self.bin / name).symlink_to(shutil.which(name))
        write_program(self.bin / "apt-get", STUB_APT)
        self.is_root(True)
        self.version, self.pip_exit, self.has_venv = "3.12", 0, folder / "has-venv"
        self.has_venv.touch()

    def is_root(self, yes):
        write_program(self.bin / "id", f"#!/bin/bash\necho {0 if yes else 1000}\n")

    def add_python(self, name="python3"):
        write_program(self.bin / name, STUB_PYTHON)

    def setup(self, *arguments, **environment):
        """Run setup.sh; returns (exit code, messages, calls of pip install and apt-get)."""
        self.log.write_text("")
        stubs = {"STUB_VERSION": self.version, "STUB_PIP_EXIT": self.pip_exit, "STUB_VENV": self.has_venv}
        variables = {"PATH": self.bin, "LOG": self.log, **stubs, **environment}
        done = subprocess.run(
            [self.bin / "bash", "scripts/setup.sh", *arguments],
            cwd=self.folder,
            env={key: str(value) for key, value in variables.items()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        calls = [
            c for c in self.log.read_text().splitlines() if "pip install" in c or c.startswith("apt-get")
        ]
        return done.returncode, done.stderr, calls


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_installs_once_and_again_when_the_lock_changes(machine):
    machine.add_python()
    code, _, calls = machine.setup()
    assert code == 0
    assert [call.split()[-1] for call in calls] == ["requirements.lock", "."]
    assert machine.setup()[2] == []
    with open(machine.folder / "requirements.lock", "a") as lock:
        lock.write("six==1.16.0\n")
    assert len(machine.setup()[2]) == 2


def test_integration_installs_the_larger_lock_which_serves_both(machine):
    machine.add_python()
    assert machine.setup()[0] == 0
    code, _, calls = machine.setup("--integration")
    assert (code, calls[0].split()[-1]) == (0, "requirements-integration.lock")
    assert machine.setup()[2] == machine.setup("--integration")[2] == []
    code, message, calls = machine.setup("--everything")
    assert (code, calls) == (2, []) and "--integration" in message


def test_a_failed_installation_is_tried_again(machine):
    machine.add_python()
    machine.pip_exit = 1
    assert machine.setup()[0] == 1
    machine.pip_exit = 0
    code, _, calls = machine.setup()
    assert (code, len(calls)) == (0, 2)


@pytest.mark.parametrize("name", ["python3.13", "python3.12", "python3.11"])
def test_finds_a_python_by_its_versioned_name(machine, name):
    machine.version = name.removeprefix("python")
    machine.add_python(name)
    assert machine.setup()[0] == 0


@pytest.mark.parametrize("version", ["3.10", "3.14", "2.7"])
def test_refuses_other_pythons_saying_which_are_good(machine, version):
    machine.version = version
    machine.add_python()
    for environment in ({}, {"PYTHON": machine.bin / "python3"}):
        code, message, calls = machine.setup(**environment)
        assert (code, calls) == (2, [])
        assert version in message
        assert "3.11, 3.12 or 3.13" in message


def test_missing_venv_module_is_installed_by_root_only(machine):
    machine.add_python()
    machine.has_venv.unlink()
    machine.is_root(False)
    code, message, calls = machine.setup()
    assert (code, calls) == (2, [])
    assert "sudo apt-get update && sudo apt-get install -y python3.12-venv" in message
    machine.is_root(True)
    code, _, calls = machine.setup()
    assert code == 0
    assert calls[:2] == ["apt-get update -qq", "apt-get install -y -qq python3.12-venv"]


def test_no_python_at_all_says_what_to_install(machine):
    machine.is_root(False)
    code, message, _ = machine.setup()
    assert code == 2
    assert "sudo apt-get install -y python3 python3-venv" in message


def test_a_venv_that_cannot_be_used_is_left_alone(machine):
    machine.add_python()
    (machine.folder / ".venv").mkdir()
    code, message, calls = machine.setup()
    assert (code, calls) == (2, [])
    assert "rm -r .venv" in message


@pytest.mark.parametrize(
    "script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name
)
def test_shell_scripts_are_executable_and_parse(script):
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
