"""The command line, exit codes, the list of keys and import paths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.config import (
    ConfigError,
    UserCodeError,
    describe,
    import_by_path,
    markdown,
    nearest,
    parse_cli,
    run_cli,
)

Run = import_by_path(f"{Path(__file__).parent}/tree.py:Run")


def write(folder: Path, name: str, text: str | bytes) -> str:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def test_every_key_is_described_with_type_default_and_meaning():
    text, table = describe(Run), markdown(Run)
    for part in ("learning_rate: float = 1e-06", "name: str | null = null", "start: int  (required)"):
        assert part in text
    docs = "File of rows, one JSON object a line."
    for part in (docs, "held.source", "rewards.terms.N", "constant | cosine | linear"):
        assert part in text and part.replace("|", "\\|") in table
    assert "to <folder>/*.json" in text and "to &lt;folder>/\\*.json" in table
    assert "## optim" in table and "`Optim`" in table
    rows = [line.replace("\\|", "") for line in table.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {5}


@pytest.mark.parametrize(
    ("word", "choices", "expected"),
    [("lr", ["betas", "learning_rate"], "learning_rate"), ("steps", ["step"], "step"), ("q", ["abc"], "")],
)
def test_nearest(word, choices, expected):
    assert nearest(word, choices) == expected


def test_import_by_path(tmp_path, monkeypatch):
    assert import_by_path("os.path:join") is import_by_path("os:path.join") is os.path.join
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine.py", "import dataclasses\n\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n")
    assert import_by_path("mine.py:A")().x == 1
    assert import_by_path(f"{tmp_path}/mine.py:A") is import_by_path("./mine.py:A")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("os", "is needed"),
        ("os:", "is needed"),
        (":x", "is needed"),
        (".os:x", "is needed"),
        ("", "is needed"),
        ("nothing_here.mod:f", "nothing_here"),
        ("os.nothing:f", "os.nothing"),
        ("nothing.py:f", "no file"),
        ("os:pathh", "did you mean 'path'"),
        ("a/b:c", "a/b"),
        ("a..b:c", "a"),
    ],
)
def test_import_paths_that_lead_nowhere(path, part):
    with pytest.raises(ConfigError) as caught:
        import_by_path(path, "rewards.terms.0.name")
    ((key, message),) = caught.value.problems
    assert key == "rewards.terms.0.name" and part in message and repr(path) in message


@pytest.mark.parametrize("body", ["1/0", "import nothing_here", "raise SystemExit(0)", "def f(:"])
def test_user_code_that_fails_on_import(tmp_path, body):
    with pytest.raises(UserCodeError, match=r"data\.source: importing") as caught:
        import_by_path(write(tmp_path, "mine.py", body) + ":f", "data.source")
    assert caught.value.__cause__ is not None


def program(argv):
    def add_options(parser):
        parser.add_argument("--port", type=int, default=1)

    line = parse_cli(argv, prog="python -m prog", description="Does it.", cls=Run, add_options=add_options)
    print(line.config.steps, line.options.port, sorted(line.explicit))


def test_command_line_takes_options_and_overrides_in_any_order(tmp_path, capsys):
    file = write(tmp_path, "run.yaml", "optim: {nesterov: true}\n")
    argv = [
        "steps=3",
        "--config",
        file,
        "name=x",
        "--port",
        "7",
        "--gin",
        "Run.layers = [1]",
        "--gin=Held.every=2",
    ]
    assert run_cli(program, argv) == 0
    assert capsys.readouterr().out == "3 7 ['held.every', 'layers', 'name', 'optim.nesterov', 'steps']\n"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["steps"], ["steps", "steps=value"]),
        (["learning_rate"], ["optim.learning_rate=value"]),
        (["run.yaml"], ["--config run.yaml"]),
        (["--optim.learning-rate=1"], ["no dashes", "optim.learning_rate=1"]),
        (["--steps", "3"], ["--steps"]),
        (["--conf", "x.yaml"], ["--conf"]),
        (["--config"], ["expected one argument", "--help"]),
        (["--port", "x"], ["--port", "--help"]),
        (["=3"], ["=3"]),
        (["optim..x=3"], ["optim..x"]),
        (["a b=3"], ["a b"]),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_message(capsys, argv, parts):
    assert run_cli(program, argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("configuration error: ") and "Traceback" not in error
    assert all(part in error for part in parts), error


def test_help_is_short_and_help_config_lists_every_key(capsys):
    for flag, longest in (("--help", 40), ("--help-config", 1000)):
        with pytest.raises(SystemExit) as caught:
            run_cli(program, [flag])
        text = capsys.readouterr().out
        assert caught.value.code == 0 and len(text.splitlines()) < longest
        assert "optim" in text and "the optimizer" in text
        assert ("final_fraction" in text) == (flag == "--help-config")


def test_exit_codes(capsys, tmp_path):
    def user(argv):
        file = write(tmp_path, "mine.py", "def boom():\n    raise KeyError('x')\nboom()\n")
        import_by_path(f"{file}:f", "data.source")

    def interrupted(argv):
        raise KeyboardInterrupt

    def bug(argv):
        raise IndexError

    assert run_cli(lambda argv: None, []) == 0
    assert run_cli(lambda argv: 75, []) == 75
    assert run_cli(interrupted, []) == 130
    capsys.readouterr()
    assert run_cli(user, []) == 3
    error = capsys.readouterr().err
    assert "in boom" in error and "KeyError: 'x'" in error and "data.source: importing" in error
    assert "imports.py" not in error and "importlib" not in error
    with pytest.raises(IndexError):
        run_cli(bug, [])


def test_the_loader_is_light():
    code = "import sys, jaxrl.config; assert not {'jax', 'gin'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
