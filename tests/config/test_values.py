"""Values, keys, hooks and messages of the config loader."""

import json
from pathlib import Path

import pytest

from jaxrl.config import ConfigError, from_dict, import_by_path, load, mistyped

Run, Term, Optim, Source, Held, Algo, Profile, Rewards = (
    import_by_path(f"{Path(__file__).parent}/tree.py:{name}")
    for name in ("Run", "Term", "Optim", "Source", "Held", "Algo", "Profile", "Rewards")
)


def problems_of(*overrides, source=None, gin=()) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(Run, source, overrides, gin)
    return dict(caught.value.problems)


def write(folder: Path, name: str, text: str | bytes) -> str:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


NUMBERS = {"1e-6": 1e-6, "1e5": 1e5, "1E+5": 1e5, ".5": 0.5, "5.": 5.0, "-2": -2.0, "1_000": 1000.0, "0": 0.0}
ONLY_YAML = {"+3.25e-1": 0.325, "007": 7.0}  # no number literals of Python


@pytest.mark.parametrize(("text", "value"), (NUMBERS | ONLY_YAML).items())
def test_numbers_mean_the_same_in_yaml_gin_and_overrides(tmp_path, text, value):
    yaml = load(Optim, write(tmp_path, "a.yaml", f"betas: [{text}, {text}]\n"))[0]
    override = load(Optim, None, [f"betas=[{text},{text}]"])[0]
    assert yaml.betas == override.betas == [value, value]
    assert all(type(beta) is float for beta in yaml.betas)
    assert load(Run, None, [f"optim.warmup={text}"])[0].optim.warmup == value
    if text in NUMBERS:
        assert load(Optim, None, [], [f"Optim.warmup = {text}"])[0].warmup == value


STRINGS = r"""a b| x |say "hi"|it's|a=b=c|x: y # z||123|1e-6|true|[a|'quoted'|"quoted"|\n|%LR|@x|!t|数学"""


@pytest.mark.parametrize("text", [*STRINGS.split("|"), "a\nb"])
def test_an_override_of_a_string_is_kept_byte_for_byte(text):
    assert load(Run, None, [f"source.path={text}"])[0].source.path == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[a, 'b c', \"d\\n\"]", ["a", "b c", "d\n"]),
        ("[]", []),
        ("plain text", "plain text"),
        ("'quoted: text'", "quoted: text"),
        ("'it''s'", "it's"),
        ("'a' b'", "'a' b'"),
        ("a: b", "a: b"),
        ("", ""),
    ],
)
def test_an_override_of_another_type_is_a_yaml_scalar_or_flow_collection(text, value):
    assert load(Run, None, [f"stop_at={text}"])[0].stop_at == value


def test_overrides_reach_every_kind_of_place():
    text = """steps=4 name=null optim={betas:[0.5,0.6]} optim.learning_rate=1e-3
        rewards.terms.0.weight=2 rewards.terms.1.name=format rewards.terms.1.args.tags=[think]
        source.options.n=3 held.source.stop=[x] profile.start=5 layers=[1,2]"""
    run, explicit = load(Run, None, text.split())
    assert run == Run(
        steps=4,
        optim=Optim(betas=[0.5, 0.6], learning_rate=1e-3),
        rewards=Rewards(terms=[Term(name="math", weight=2.0), Term(name="format", args={"tags": ["think"]})]),
        source=Source(options={"n": 3}),
        held=Held(source=Source(path="test.jsonl", stop=["x"])),
        profile=Profile(start=5),
        layers=[1, 2],
    )
    changed = "steps name optim.betas rewards.terms.0.weight held.source.stop profile.start"
    assert explicit >= set(changed.split())
    assert not explicit & set(
        "optim held held.source.path optim.schedule rewards.terms.0.args profile".split()
    )


BAD_VALUES = [
    ("steps=1.0", "steps", ["1.0 given", "a whole number", "write 1"]),
    ("steps=1e5", "steps", ["write 100000"]),
    ("steps=true", "steps", ["true given", "a whole number"]),
    ("steps=", "steps", ['"" given', "a whole number"]),
    ("steps=null", "steps", ["null given"]),
    ("steps=many", "steps", ['"many" given']),
    ("steps=" + "9" * 5000, "steps", ["digits"]),
    ("optim.learning_rate=true", "optim.learning_rate", ["true given", "a number"]),
    ("optim.learning_rate='1e-6'", "optim.learning_rate", ['"1e-6" given', "without quotes"]),
    ("optim.learning_rate=.nan", "optim.learning_rate", ["finite"]),
    ("optim.learning_rate=-.inf", "optim.learning_rate", ["finite"]),
    ("optim.learning_rate=1e999", "optim.learning_rate", ["finite"]),
    ("optim.learning_rate=" + "9" * 400, "optim.learning_rate", ["finite"]),
    ("optim.learning_rate=1e-6x", "optim.learning_rate", ['"1e-6x" given', "a number"]),
    ("optim.nesterov=yes", "optim.nesterov", ['"yes" given', "true or false"]),
    ("optim.nesterov=1", "optim.nesterov", ["1 given", "true or false"]),
    ("optim.schedule=cosin", "optim.schedule", ["constant, cosine, linear", "did you mean cosine"]),
    ("optim.schedule=Cosine", "optim.schedule", ["did you mean cosine"]),
    ("optim.schedule=null", "optim.schedule", ['"null" given', "one of"]),
    ("optim.betas=0.9", "optim.betas", ["a list is needed"]),
    ("optim.betas=[0.9, x]", "optim.betas.1", ['"x" given', "a number"]),
    ("optim.betas=[0.9", "optim.betas", ["starts as a list"]),
    ("source.options={a: 1} b", "source.options", ["starts as a mapping"]),
    ("source.options={a: x}", "source.options.a", ["a whole number"]),
    ("source.options={1: 1}", "source.options", ["1 given as a key", "quotes"]),
    ("source.stop=x", "source.stop", ["a list is needed", "write [x]"]),
    ("source.stop=[1]", "source.stop.0", ["a string", "write it in quotes"]),
    ("source.max_prompt_tokens=None", "source.max_prompt_tokens", ["write null"]),
    ("source.max_prompt_tokens=x", "source.max_prompt_tokens", ["a whole number or null"]),
    ("layers=[1, 2.5]", "layers.1", ["2.5 given"]),
    ("optim=3", "optim", ["3 given", "a section", "learning_rate"]),
    ("optim=null", "optim", ["a section"]),
    ("profile={}", "profile.start", ["not given", "a whole number", "first step"]),
    ("rewards.terms=[{weight: 2}]", "rewards.terms.0.name", ["not given", "which reward"]),
    ("rewards.terms=[math]", "rewards.terms.0", ['"math" given', "a section"]),
    ("rewards.terms.2.name=x", "rewards.terms.2.name", ["0 to 1"]),
    ("rewards.terms.x=1", "rewards.terms.x", ["0 to 1"]),
    ("rewards.terms=[{name: a, args: {x: .nan}}]", "rewards.terms.0.args.x", ["finite"]),
    ("steps.x=1", "steps", ["a whole number"]),
]
WORDS = ["no", "No", "off", "yes", "on", "'false'", '"False"', "'true '"]
"""Texts to YAML 1.2, which would count as true; quoted ones are no better."""
BAD_VALUES += [
    (f"rewards.by_name.a={{name: m, args: {args}}}", f"rewards.by_name.a.args.{key}", [f"write {good}"])
    for key, args, good in [
        *(("x", f"{{x: {word}}}", "true or false") for word in WORDS),
        ("x.y.1", "{x: {y: [1, no]}}", "true or false"),
        ("x", "{x: None}", "null"),
        ("x", "{x: 'null'}", "null"),
    ]
]


@pytest.mark.parametrize(("override", "key", "parts"), BAD_VALUES, ids=[case[0][:40] for case in BAD_VALUES])
def test_a_wrong_value_is_refused_with_what_was_given_and_what_is_needed(override, key, parts):
    found = problems_of(override)
    assert list(found) == [key]
    assert all(part in found[key] for part in parts), found[key]


@pytest.mark.parametrize("word", ["no", "off", "yes", "on", "False", "'false'"])
def test_a_switch_of_any_type_is_a_boolean_or_refused_in_every_source(word, tmp_path):
    """Never the text, which counts as true."""
    quoted = f'"{word}"' if word != "'false'" else word
    (tmp_path / "run.yaml").write_text(f"rewards:\n  by_name: {{a: {{name: m, args: {{x: {word}}}}}}}\n")
    (tmp_path / "run.gin").write_text(
        f"Rewards.by_name = {{'a': {{'name': 'm', 'args': {{'x': {quoted}}}}}}}"
    )
    (tmp_path / "run.json").write_text(
        json.dumps({"rewards": {"by_name": {"a": {"name": "m", "args": {"x": word.strip("'")}}}}})
    )
    loads = {
        "yaml": lambda: load(Run, tmp_path / "run.yaml"),
        "json": lambda: load(Run, tmp_path / "run.json"),
        "gin": lambda: load(Run, tmp_path / "run.gin"),
        "command line": lambda: load(
            Run, None, ["rewards.by_name.a.name=m", f"rewards.by_name.a.args.x={word}"]
        ),
    }
    for source, load_it in loads.items():
        if word == "False" and source in ("yaml", "command line"):
            assert load_it()[0].rewards.by_name["a"].args == {"x": False}
            continue
        with pytest.raises(ConfigError, match=r"rewards.by_name.a.args.x: .*true or false"):
            load_it()


def test_numbers_of_any_type_are_numbers_in_every_source(tmp_path):
    """YAML 1.1 reads 1e-6 as a text."""
    (tmp_path / "run.yaml").write_text("rewards: {by_name: {a: {name: m, args: {x: 1e-6}}}}\n")
    (tmp_path / "run.gin").write_text("Rewards.by_name = {'a': {'name': 'm', 'args': {'x': 1e-6}}}")
    override = ["rewards.by_name.a={name: m}", "rewards.by_name.a.args.x=1e-6"]
    for source, overrides in ((tmp_path / "run.yaml", []), (tmp_path / "run.gin", []), (None, override)):
        assert load(Run, source, overrides)[0].rewards.by_name["a"].args == {"x": 1e-6}


def switched(*, gold: str = "a", scale: float = 1.0, strict: bool = False, rows: int | None = 2, tags=()):
    """A function of the user's."""


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        ({"gold": "2", "scale": 1e-6, "strict": True, "rows": None, "tags": "x"}, None),
        ({"scale": 1, "other": "1"}, None),
        ({"scale": "1e-6"}, '"1e-6" given; a number is needed'),
        ({"strict": 1}, "1 given; true or false is needed"),
        ({"strict": "nein"}, '"nein" given; true or false is needed'),
        ({"rows": 2.5}, "2.5 given; a whole number is needed"),
        ({"rows": True}, "true given; a whole number is needed"),
        ({"gold": 3}, "3 given; a text is needed"),
        ({"strict": None}, "null given; true or false"),
    ],
)
def test_arguments_of_the_users_functions_have_the_types_they_are_annotated_with(args, wrong):
    found = [message for _, message in mistyped(switched, args)]
    assert len(found) == (wrong is not None) and (wrong is None or wrong in found[0])


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("optim.learning_rat", "optim.learning_rate"),
        ("optim.lr", "optim.learning_rate"),
        ("learning_rate", "optim.learning_rate"),
        ("optim.clip_high", "algo.clip_high"),
        ("held.path", "source.path or held.source.path"),
        ("held.source.pth", "held.source.path"),
        ("optm", "optim"),
        ("rewards.terms.0.wieght", "rewards.terms.0.weight"),
        ("zzz", "the keys of a config are steps, name"),
        ("algo.zzz", "the keys of algo are name, clip_high, bonus"),
    ],
)
def test_an_unknown_key_is_refused_at_any_depth_with_the_nearest(key, expected):
    found = problems_of(f"{key}=1")
    assert list(found) == [key]
    assert "unknown key" in found[key] and expected in found[key]


@pytest.mark.parametrize("name", "api_key hf_token wandb_password MY-SECRET token aws_secret_key".split())
def test_secrets_are_refused_without_repeating_them(name):
    for override in (f"optim.{name}=hunter2", f"rewards.terms.0.args.{name}=hunter2"):
        found = problems_of(override)
        message = found[override.partition("=")[0]]
        assert "environment" in message and "hunter2" not in message


def test_names_of_tokens_are_no_secrets():
    args = {"max_prompt_tokens": 3, "stop_token_ids": [1], "eos_token": "<eos>", "tokenizer": "x"}
    term = from_dict(Term, {"name": "x", "args": args})
    assert term.args == args
    assert load(Run, None, ["source.max_prompt_tokens=7"])[0].source.max_prompt_tokens == 7


def test_all_problems_come_at_once():
    overrides = (
        "junk optim.lr=1 steps=x rewards.terms.0.weight=y source.stop=[ algo.clip_high=0.1 held.every=1.5"
    )
    found = problems_of(*overrides.split(), gin=["Nothing.x = 1", "Run.layers = ["])
    expected = "junk --gin Nothing.x optim.lr steps rewards.terms.0.weight source.stop held.every"
    assert set(found) == set(expected.split())


def test_type_problems_of_one_section_do_not_hide_the_lints_of_another():
    found = problems_of("steps=x", "optim.learning_rate=-1", "optim.final_fraction=0.5")
    assert set(found) == {"steps", "optim.learning_rate", "optim.final_fraction"}
    assert found["optim.learning_rate"] == "-1.0 given; more than 0 is needed (command line)"


def test_a_check_across_sections_that_stumbles_over_a_reported_value_is_left_out():
    assert set(problems_of("optim.learning_rate=0", "steps=0")) == {"optim.learning_rate"}
    with pytest.raises(ZeroDivisionError):
        load(Run, None, ["steps=0"])
    assert set(problems_of("held.every=200")) == {"held.every"}


def test_the_text_of_an_error_has_one_line_a_problem():
    with pytest.raises(ConfigError) as caught:
        load(Run, None, ["steps=x", "layers=3"])
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["2 problems:", "  steps", "  layers"]
    assert str(ConfigError("3 given; 4 is needed", key="a.b")) == "a.b: 3 given; 4 is needed"


def test_presets_are_defaults_that_what_is_given_beats():
    assert load(Run, None, [])[0].algo == Algo()
    assert load(Run, None, ["algo.name=dapo"])[0].algo == Algo(name="dapo", clip_high=0.28)
    run, explicit = load(Run, None, ["algo.name=dapo", "algo.clip_high=0.3"])
    assert run.algo.clip_high == 0.3 and explicit == {"algo.name", "algo.clip_high"}


def test_a_section_given_in_part_keeps_its_own_defaults():
    assert load(Run, None, ["held.source.stop=[x]"])[0].held.source.path == "test.jsonl"
    assert load(Run, None, ["held.every=1"])[0].held.source.path == "test.jsonl"


def test_dead_options_see_what_the_user_set():
    assert "no effect" in problems_of("optim.final_fraction=0.1")["optim.final_fraction"]
    load(Run, None, ["optim.final_fraction=0.2", "optim.schedule=cosine"])


def test_from_dict_names_keys_below_the_given_one():
    with pytest.raises(ConfigError) as caught:
        from_dict(Term, {"weight": "x"}, key="rewards.terms.3")
    assert {key for key, _ in caught.value.problems} == {"rewards.terms.3.weight", "rewards.terms.3.name"}
