"""What every command makes of its arguments: nothing is ignored, lost or guessed."""

import socket

import pytest

from jaxrl import evaluate, export, report, serve, smoke, train
from jaxrl import plan as plan_command
from jaxrl.config import run_cli

TINY = """\
name: tiny
steps: 2
model:
  scratch: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: builtin:chars
data: {source: arithmetic, prompts_per_step: 2, chat_template: none}
rollout: {group_size: 2, max_new_tokens: 8}
rewards: {terms: [{name: math_answer}]}
metrics: {progress: none}
"""
WITH_CONFIG = {
    "train": train.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "plan": plan_command.main,
    "smoke": smoke.main,
}
COMMANDS = WITH_CONFIG | {"report": report.main, "serve": serve.main}


class Loaded(Exception):
    """A command went on to load its model."""


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    """What a command refuses, it refuses before it loads, downloads or compiles anything."""

    def refuse(*_, **__):
        raise Loaded

    for place in (
        "run.opening.set_up",
        "evaluate.set_up",
        "export.set_up",
        "smoke.check",
        "models.hf.resolve",
    ):
        monkeypatch.setattr(f"jaxrl.{place}", refuse)
    monkeypatch.setattr("jaxrl.planner.command.compile_run", refuse)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"{TINY}output_dir: {tmp_path}/runs\n")
    return str(path)


@pytest.fixture
def run(tmp_path, file):
    """The folder of a run, as far as arguments are concerned."""
    folder = tmp_path / "runs" / "tiny"
    (folder / "checkpoints" / "2").mkdir(parents=True)
    (folder / "config.yaml").write_text(TINY)
    return str(folder)


@pytest.fixture
def refused(capsys):
    """refused(command, *arguments) -> the message, of exit code 2."""

    def call(command, *arguments):
        code = run_cli(COMMANDS[command], [str(word) for word in arguments])
        text = capsys.readouterr()
        assert code == 2, text
        assert "Traceback" not in text.err
        return text.err

    return call


@pytest.mark.parametrize("command", WITH_CONFIG)
def test_the_configuration_is_given_once(command, file, refused):
    assert "--config is given twice" in refused(command, "--config", file, f"--config={file}")


@pytest.mark.parametrize(
    ("command", "twice"),
    [
        ("train", ["--verify-resume", "--verify-resume"]),
        ("smoke", ["--keep", "--keep"]),
        ("evaluate", ["--run=a", "--run", "a"]),
        ("evaluate", ["--output=a", "--output", "b"]),
        ("export", ["--dtype=float32", "--dtype=bfloat16"]),
        ("plan", ["--topology=v5e:4x4", "--topology", "v5e:2x2"]),
        ("plan", ["--auto", "--auto"]),
        ("report", ["a", "--png=x", "--png", "x"]),
        ("serve", ["--port=1", "--port", "2"]),
    ],
    ids=" ".join,
)
def test_an_option_is_given_once(command, twice, refused):
    assert "is given twice; keep one" in refused(command, *twice)


@pytest.mark.parametrize(
    ("command", "short"),
    [
        ("train", "--verify"),
        ("train", "--conf=x.yaml"),
        ("smoke", "--kee"),
        ("evaluate", "--ru=runs/x"),
        ("evaluate", "--out=x"),
        ("export", "--dty=float32"),
        ("plan", "--top=v5e:4x4"),
        ("report", "--out=x"),
        ("serve", "--mod=x"),
    ],
)
def test_options_are_not_abbreviated(command, short, file, refused):
    more = {"report": ["runs/x"], "serve": ["--protocol=jetstream", "--model=x"]}
    words = more.get(command, ["--config", file] if "conf" not in short else [])
    assert short.partition("=")[0] in refused(command, *words, short)


@pytest.mark.parametrize(
    "words",
    [
        ["steps=3", "steps=4"],
        ["steps=3", "steps=3"],
        ["optim.learning_rate=1e-5", "optim={learning_rate: 1e-4}"],
        ["optim={learning_rate: 1e-4}", "optim.learning_rate=1e-5"],
        ["rewards.terms.0.weight=2", "rewards.terms=[{name: format}]"],
        ["rewards.terms=[{name: format, weight: 1}]", "rewards.terms.0.weight=2"],
        ["eval.limit=null", "eval.limit=3"],
        ["--gin=OptimConfig.b1 = 0.5", "--gin=OptimConfig.b1 = 0.6"],
        ["--gin=OptimConfig.b1 = 0.5", "--gin=optim/OptimConfig.b1 = 0.6"],
        ["--gin=B = 0.5", "--gin=B = 0.6", "--gin=OptimConfig.b1 = %B"],
        ["--gin=OptimConfig.b1 = 0.5", "optim.b1=0.6"],
    ],
    ids=" ".join,
)
def test_a_key_is_given_once(words, file, refused):
    message = refused("train", "--config", file, *words)
    assert "given twice" in message or "written twice" in message


def test_a_list_or_mapping_and_more_of_it_go_together(file):
    words = ["rewards.terms=[{name: format}]", "rewards.terms.0.weight=2", "optim={b1: 0.5}", "optim.b2=0.6"]
    with pytest.raises(Loaded):
        run_cli(train.main, ["--config", file, *words])


@pytest.mark.parametrize("command", ["evaluate", "export"])
@pytest.mark.parametrize("written", ["--run=", "--run "])
def test_the_run_is_found_however_the_option_is_written(command, written, run, tmp_path, monkeypatch):
    """Its parameters, not fresh ones: the configuration that would be assembled starts from the run."""
    seen = []

    def set_up(config):
        seen.append(config.init_from)
        raise Loaded

    monkeypatch.setattr(f"jaxrl.{command}.set_up", set_up)
    words = [*(written + run).split(), f"--output={tmp_path}/out"]
    with pytest.raises(Loaded):
        run_cli(COMMANDS[command], words)
    assert seen == [run]


@pytest.mark.parametrize("command", ["evaluate", "export"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "FILE"], "--run: given with --config"),
        (["init_from=elsewhere"], "init_from: given with --run"),
    ],
)
def test_sources_that_contradict_each_other_are_refused(
    command, words, message, run, file, tmp_path, refused
):
    words = [word.replace("FILE", file) for word in words]
    assert message in refused(command, "--run", run, f"--output={tmp_path}/out", *words)


def test_evaluation_is_not_switched_off(run, refused):
    assert "eval.at_end" in refused("evaluate", "--run", run, "eval.at_end=false")


def test_smoke_takes_its_configuration_as_a_word(file, refused):
    with pytest.raises(Loaded):
        run_cli(smoke.main, ["--keep", file])
    assert "keep one" in refused("smoke", file, "--config", file)


@pytest.mark.parametrize(
    "key",
    [
        "output_dir",
        "init_from",
        "executables",
        "model.path",
        "model.tokenizer",
        "data.path",
        "data.chat_template",
        "eval.path",
        "checkpoint.output_dir",
        "rewards.terms.0.args.path",
    ],
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "empty path"),
        ("  ", "empty path"),
        ("~nobody-of-that-name/x", "no home folder ~nobody-of-that-name"),
        ("/a/" + "n" * 300, "at most 255 bytes"),
        ("ü" * 128, "at most 255 bytes"),
        ("/ab" * 2000, "at most 255 bytes"),
        ("a\0b", "NUL"),
    ],
)
def test_what_no_path_can_be_is_refused_with_its_key(key, value, message, file, refused):
    extra = ["rewards.terms.0.name=reward_model"] if "rewards" in key else []
    extra += ["eval.at_end=true"] if "eval" in key else []
    extra += ["model.scratch.x=1"] if key == "model.path" else []
    found = refused("train", "--config", file, *extra, f"{key}={value}")
    assert any(key in line and message in line for line in found.splitlines()), found


def test_the_path_of_a_function_is_checked_too(file, refused):
    found = refused("train", "--config", file, "rewards.terms.0.name=~nobody-of-that-name/my.py:f")
    assert "no home folder" in found and "rewards.terms.0.name" in found


def test_a_name_is_short_enough_to_name_files(file, refused):
    assert "name: 300 characters; at most 128" in refused("train", "--config", file, f"name={'n' * 300}")


@pytest.mark.parametrize(
    "key", ["output_dir", "executables", "checkpoint.output_dir"], ids=lambda key: key.replace(".", "-")
)
@pytest.mark.parametrize("place", ["a file", "below a file", "read-only"])
def test_a_folder_that_cannot_be_written_is_found_at_the_start(key, place, file, tmp_path, refused):
    (tmp_path / "taken").write_text("")
    folder = {"a file": "taken", "below a file": "taken/x/y", "read-only": "/proc/x"}[place]
    message = refused("train", "--config", file, f"{key}={tmp_path / folder}")
    assert f"{key}: " in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken", "tiny.yaml"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("evaluate", ["--config", "FILE", "--output=PLACE"]),
        ("export", ["--run=RUN", "--output=PLACE"]),
        ("plan", ["--config", "FILE", "--topology=v5e:2x2", "--json=PLACE"]),
        ("plan", ["--config", "FILE", "--topology=v5e:2x2", "--page=PLACE"]),
        ("plan", ["--config", "FILE", "--topology=v5e:2x2", "--auto", "--overlay=PLACE"]),
        ("report", ["RUN", "--output=PLACE"]),
        ("report", ["RUN", "--png=PLACE"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
@pytest.mark.parametrize(
    "place",
    ["", "/dev/null/x", "/proc/x", "~nobody-of-that-name/x", "n" * 300],
    ids=lambda p: p[:20] or "empty",
)
def test_an_output_that_cannot_be_written_is_found_at_the_start(command, words, place, file, run, refused):
    words = [w.replace("FILE", file).replace("RUN", run).replace("PLACE", place) for w in words]
    assert words[-1].partition("=")[0] in refused(command, *words)


def test_an_existing_folder_is_no_place_to_export_to(run, tmp_path, refused):
    assert "--output: " in refused("export", "--run", run, "--output", tmp_path)


def test_home_is_expanded_in_options_and_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("jaxrl.run.opening.set_up", lambda config: (_ for _ in ()).throw(Loaded(config)))
    (tmp_path / "base.yaml").write_text(TINY)
    (tmp_path / "mine.yaml").write_text("base: ~/base.yaml\noutput_dir: ~/runs\n")
    with pytest.raises(Loaded) as caught:
        run_cli(train.main, ["--config=~/mine.yaml"])
    (config,) = caught.value.args
    assert config.run_dir == tmp_path / "runs" / "tiny"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--port=0"], "--port"),
        (["--port=99999"], "--port"),
        (["--port=TAKEN"], "--port"),
        (["--host=203.0.113.7"], "--port"),
        (["--host=no.such.host.invalid"], "--host"),
        (["--host="], "--host"),
        (["--slots=0"], "--slots"),
        (["--tensor=-1"], "--tensor"),
        (["--temperature=nan"], "--temperature"),
        (["--temperature=-1"], "--temperature"),
        (["--top-p=2"], "--top-p"),
        (["--model="], "--model"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_server_that_cannot_be_is_refused_before_its_model_is_loaded(words, option, refused):
    given = ["--protocol=jetstream", *([] if option == "--model" else ["--model=m"])]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        assert option in refused("serve", *given, *words)
