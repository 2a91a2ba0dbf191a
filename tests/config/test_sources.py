"""YAML, JSON and gin files, their composition, and round trips."""

import json
from pathlib import Path

import pytest

from jaxrl.config import ConfigError, import_by_path, load, to_dict, to_yaml

Run, Term, Optim, Source, Profile, Rewards = (
    import_by_path(f"{Path(__file__).parent}/tree.py:{name}")
    for name in ("Run", "Term", "Optim", "Source", "Profile", "Rewards")
)


def problems_of(*overrides, source=None, gin=()) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(Run, source, overrides, gin)
    return dict(caught.value.problems)


def write(folder: Path, name: str, text: str | bytes) -> str:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


# YAML and JSON files

YAML = """\
# a comment
steps: 20
name: "a: b"
optim:
  learning_rate: 1e-5
  schedule: cosine
  betas: [0.8, 0.9]
source: {stop: ["</a>", 'b c'], options: {n: 1_000}}
rewards:
  terms:
    - name: math
      weight: 2
    - {name: format, args: {tags: [think, answer], strict: true, day: 2024-01-02}}
profile:
  start: 5
"""


def test_yaml_gives_the_tree_and_its_keys(tmp_path):
    run, explicit = load(Run, write(tmp_path, "run.yaml", YAML))
    assert run == Run(
        steps=20,
        name="a: b",
        optim=Optim(learning_rate=1e-5, schedule="cosine", betas=[0.8, 0.9]),
        source=Source(stop=["</a>", "b c"], options={"n": 1000}),
        rewards=Rewards(
            terms=[
                Term(name="math", weight=2.0),
                Term(name="format", args={"tags": ["think", "answer"], "strict": True, "day": "2024-01-02"}),
            ]
        ),
        profile=Profile(start=5),
    )
    assert {"steps", "optim.betas", "source.options", "rewards.terms", "rewards.terms.1.args"} <= explicit
    assert "optim" not in explicit and "optim.nesterov" not in explicit


def test_json_reads_like_yaml(tmp_path):
    run = load(Run, write(tmp_path, "run.yaml", YAML))[0]
    assert load(Run, write(tmp_path, "run.json", json.dumps(to_dict(run), indent="\t")))[0] == run


def test_an_empty_file_is_all_defaults(tmp_path):
    for text in ("", "# nothing\n", "---\n", b"\xef\xbb\xbfsteps: 10\n"):
        assert load(Run, write(tmp_path, "run.yaml", text))[0] == Run()


def test_problems_name_file_and_line(tmp_path):
    text = "optim:\n  nesterov: false\n  lr: 1\nsource:\n  stop:\n    - a\n    - 1\n"
    file = write(tmp_path, "run.yaml", text)
    found = problems_of(source=file)
    assert found["optim.lr"].endswith(f"({file}:3)")
    assert found["source.stop.1"].endswith(f"({file}:7)")


SYNTAX = [
    ("steps: 1\noptim:\n\tlearning_rate: 1\n", 3, "a tab"),
    ("steps: 1\nname: a: b\n", 2, "quotes"),
    ("steps: [1\nname: b\n", 2, "expected"),
    ("name: 'abc\n", 1, ""),
    ("steps: *nowhere\n", 1, "undefined alias"),
    ("steps: 1\n---\nsteps: 2\n", 2, "second document"),
    ("name: !!python/object/apply:os.system ['true']\n", 1, "!!python/object/apply:os.system"),
    ("name: !secret x\n", 1, "!secret"),
    ("a: &a {<<: *a}\n", 1, "merge keys"),
    ("source: &s\n  options: *s\n", 1, "aliases"),
    ("? [a]\n: 1\n", 1, "key"),
]


@pytest.mark.parametrize(("text", "line", "part"), SYNTAX, ids=[repr(case[0][:25]) for case in SYNTAX])
def test_what_yaml_cannot_read_is_refused_with_its_line(tmp_path, text, line, part):
    file = write(tmp_path, "run.yaml", text)
    found = problems_of(source=file)
    message = next(message for key, message in found.items() if key == f"{file}:{line}")
    assert part in message and len(found) <= 2


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("steps: 1\nname: a\nsteps: 2\n", "steps", "on line 1 and at"),
        ("optim:\n  nesterov: true\n  nesterov: true\n", "optim.nesterov", "on line 2 and at"),
        ("rewards:\n  terms:\n    - {name: a, name: b}\n", "rewards.terms.0.name", "written twice"),
        ("1: 2\n", None, "1 given as a key"),
        ("true: 2\n", None, "true given as a key"),
        ("optim:\n", "optim", "nothing given"),
        ("optim.learning_rate: 1e-5\n", "optim.learning_rate", "nested"),
        ("name: 123\n", "name", "write it in quotes"),
        ("steps: '3'\n", "steps", "without quotes"),
        ("optim: {learning_rate: nan}\n", "optim.learning_rate", '"nan" given'),
    ],
)
def test_yaml_that_is_no_config_is_refused(tmp_path, text, key, part):
    found = problems_of(source=write(tmp_path, "run.yaml", text))
    assert any(part in message and key in (name, None) for name, message in found.items()), found


@pytest.mark.parametrize(
    "text", ["- a\n", "just text\n", "3\n", b"\xff\xfe\x00", "name: \x01\n", "[" * 500, "[1]"]
)
def test_other_files_are_refused(tmp_path, text):
    for suffix in ("yaml", "json", "gin"):
        file = write(tmp_path, f"run.{suffix}", text)
        assert any(file in key for key in problems_of(source=file))


def test_deep_nesting_and_alias_bombs_are_refused(tmp_path):
    args = f'{{"x": {"[" * 200 + "]" * 200}}}'
    deep = write(tmp_path, "deep.json", f'{{"rewards": {{"terms": [{{"name": "a", "args": {args}}}]}}}}')
    assert any("too deeply" in message for message in problems_of(source=deep).values())
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    bomb = write(tmp_path, "bomb.yaml", "\n".join(lines))
    assert any("aliases" in message for message in problems_of(source=bomb).values())


def test_files_that_are_not_there(tmp_path):
    write(tmp_path, "quickstart.yaml", "")
    missing = str(tmp_path / "quickstrat.yaml")
    assert "did you mean" in problems_of(source=missing)[missing]
    assert "quickstart.yaml" in problems_of(source=missing)[missing]
    (tmp_path / "folder.yaml").mkdir()
    folder = str(tmp_path / "folder.yaml")
    assert "a folder" in problems_of(source=folder)[folder]
    toml = write(tmp_path, "run.toml", "")
    assert ".gin" in problems_of(source=toml)[toml]


# Composition


def test_base_is_relative_and_the_child_wins(tmp_path):
    (tmp_path / "sub").mkdir()
    base = "steps: 1\noptim: {learning_rate: 1e-3, nesterov: true}\nsource: {options: {a: 1}, stop: [x]}\n"
    write(tmp_path, "base.yaml", base)
    write(tmp_path, "mid.yaml", "base: base.yaml\nsteps: 2\nsource: {options: {b: 2}, stop: [y]}\n")
    child = write(tmp_path, "sub/child.yaml", "base: ../mid.yaml\noptim: {learning_rate: 1e-4}\n")
    run, explicit = load(Run, child, ["optim.betas=[0, 0]"])
    assert run.steps == 2
    assert run.optim == Optim(learning_rate=1e-4, nesterov=True, betas=[0.0, 0.0])
    assert run.source.options == {"a": 1, "b": 2} and run.source.stop == ["y"]
    assert explicit >= {"steps", "optim.nesterov", "optim.learning_rate", "optim.betas"}


def test_base_problems_name_the_files(tmp_path):
    a = write(tmp_path, "a.yaml", "base: b.yaml\n")
    write(tmp_path, "b.yaml", "base: a.yaml\n")
    assert any("leads back to itself" in message for message in problems_of(source=a).values())
    lost = write(tmp_path, "c.yaml", "base: nowhere.yaml\n")
    assert any("named in" in m and "c.yaml" in m for m in problems_of(source=lost).values())
    write(tmp_path, "d.yaml", "base: 3\n")
    assert "base" in problems_of(source=str(tmp_path / "d.yaml"))
    write(tmp_path, "bad.yaml", "optim: {lr: 1}\n")
    child = write(tmp_path, "e.yaml", "base: bad.yaml\nsteps: 3\n")
    assert "bad.yaml:1" in problems_of(source=child)["optim.lr"]


# Gin

GIN = """\
# a comment
include 'sub/base.gin'
LR = 1e-5
Run.steps = 20
Run.name = 'a: b'
Optim.learning_rate = %LR
Optim:
  schedule = 'cosine'
  betas = (0.8, 0.9)  # a tuple
source/Source.stop = ['</a>',
  "b c"]
source/Source.options = {'n': 1_000}
Rewards.terms = [
    {'name': 'math', 'weight': %WEIGHT},
    {'name': 'format', 'args': {'tags': ['think', 'answer'], 'strict': True, 'day': '2024-01-02'}},
]
Run.profile = None
WEIGHT = 2
jaxrl.Profile.start = 5
"""


def test_gin_and_yaml_give_the_same_tree(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, "sub/base.gin", "Run.steps = 1\nLR = 7\ninclude 'more.gin'\n")
    write(tmp_path, "sub/more.gin", "Optim.schedule = 'linear'\n")
    gin = load(Run, write(tmp_path, "run.gin", GIN))
    yaml = load(Run, write(tmp_path, "run.yaml", YAML))
    assert gin == yaml


@pytest.mark.parametrize("text", 'a b|say "hi"|it\'s|a=b|x # y|\\n|a\nb|数学 🙂|%LR|'.split("|"))
def test_gin_strings_are_python_strings(text):
    assert load(Run, None, [], [f"Run.name = {text!r}"])[0].name == text


def test_bindings_and_overrides_lie_over_any_file(tmp_path):
    file = write(tmp_path, "run.yaml", YAML)
    bindings = ["Optim.learning_rate = 1e-2"]
    run, explicit = load(Run, file, ["optim.nesterov=true"], bindings)
    assert run.optim == Optim(learning_rate=1e-2, schedule="cosine", betas=[0.8, 0.9], nesterov=True)
    assert "optim.learning_rate" in explicit
    gin = write(tmp_path, "run.gin", "LR = 1\nOptim.learning_rate = %LR\nOptim.betas = [%LR, %B]\nB = 0.5\n")
    assert load(Run, gin, [], ["LR = 3", "B = 0"])[0].optim == Optim(learning_rate=3.0, betas=[3.0, 0.0])


BAD_GIN = [
    ("Optm.learning_rate = 1", "Optm.learning_rate", "did you mean Optim"),
    ("Zzz.learning_rate = 1", "Zzz.learning_rate", "there are Algo"),
    ("Optim.lr = 1", "optim.lr", "did you mean optim.learning_rate"),
    ("Optim.learning_rate = '1'", "optim.learning_rate", "without quotes"),
    ("optim.learning_rate = 1", "optim.learning_rate", "write Optim.learning_rate"),
    ("Source.path = 'x'", "Source.path", "write one of source/Source.path, held/source/Source.path"),
    ("other/Optim.betas = [0, 0]", "other/Optim.betas", "write Optim.betas"),
    ("Term.weight = 1", "Term.weight", "Rewards.terms = [{'weight'"),
    ("Optim.learning_rate = %LR", "%LR", "no such macro"),
    ("A = %B\nB = %A\nOptim.learning_rate = %A", "%A", "leads back to itself"),
    ("Optim.learning_rate = @f()", "@f", "import path"),
    ("import os", ":1", "no import is needed"),
    ("Run.steps = 1\nRun.steps = 2", "Run.steps", "written twice, at"),
    ("Run.steps = abc", ":1", "strings need quotes"),
    ("Run.steps = 1\nRun.layers = [1,\n", "", "not closed"),
    ("Run.steps 3", ":1", "Couldn't parse"),
    ("Run.steps =", ":1", "parse value"),
    ("Run/ steps = 3", ":1", ""),
    ("include 3", ":1", "file path"),
    ("include 'nowhere.gin'", "nowhere.gin", "no such file"),
    ("include 'run.gin'", "run.gin", "leads back to itself"),
    ("include 'run.yaml'", "run.yaml", "a gin file includes .gin files"),
    ("Run.steps = 1e999", "steps", "Infinity given"),
    ("Run.layers = {1: 2}", "layers", "a list is needed"),
]


@pytest.mark.parametrize(("text", "key", "part"), BAD_GIN, ids=[case[0][:30] for case in BAD_GIN])
def test_bad_gin_is_refused_with_its_key(tmp_path, text, key, part):
    found = problems_of(source=write(tmp_path, "run.gin", text))
    assert len(found) == 1
    name, message = found.popitem()
    assert key in name and part in message, (name, message)


def test_gin_keeps_nothing_between_two_loads():
    load(Run, None, [], ["LR = 1", "Optim.learning_rate = %LR"])
    assert load(Run, None, [], ["Run.steps = 3"])[0] == Run(steps=3)
    assert "%LR" in problems_of(gin=["Optim.learning_rate = %LR"])
    import gin

    assert gin.config_str() == ""


# Round trips


def test_to_yaml_loads_back_to_an_equal_instance(tmp_path):
    texts = (
        "| a |1e-6|null|true|on|a: b|# x|'|\"|数学 🙂|- a|[a|{a|*a|&a|!a|%a|@a|~|2024-01-02|1_000|=".split(
            "|"
        )
    )
    texts += ["a\nb\n", "\t", "\x07"]
    texts += ["x" * 500, "a b " * 60]
    free = [t for t in texts if t not in ("null", "true", "on", "~")]  # refused where any type will do
    run = Run(
        name="it's",
        optim=Optim(learning_rate=1.5e-7, warmup=0.5, betas=[0.1 + 0.2, 1e-300], schedule="cosine"),
        source=Source(options={"null": 1, "1": 2, "a b": 3}, stop=texts),
        rewards=Rewards(terms=[Term(name=t, args={t: t, "n": [1, 2.5, None, True, {}]}) for t in free]),
        profile=Profile(start=1),
    )
    text = to_yaml(run)
    assert load(Run, write(tmp_path, "config.yaml", text))[0] == run
    assert load(Run, write(tmp_path, "config.json", json.dumps(to_dict(run))))[0] == run
    assert to_yaml(load(Run, str(tmp_path / "config.yaml"))[0]) == text


def test_only_what_was_changed_counts_as_set_in_a_resolved_config(tmp_path):
    run, explicit = load(Run, None, ["algo.name=dapo", "optim.nesterov=true", "held.every=3"])
    file = write(tmp_path, "config.yaml", to_yaml(run))
    again, explicit_again = load(Run, file)
    assert again == run
    assert explicit_again == explicit
    assert load(Run, file, ["steps=10", "source.path=train.jsonl"])[1] == explicit | {"steps", "source.path"}
    assert "optim.final_fraction" in problems_of("optim.final_fraction=0.1", source=file)
