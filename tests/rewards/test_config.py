"""What the rewards section refuses, and what it accepts."""

import re
from pathlib import Path

import pytest

import jaxrl
from jaxrl.config import ConfigError, UserCodeError, load
from jaxrl.rewards import RewardsConfig

USER = str(Path(__file__).parent / "user_functions.py")


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(RewardsConfig, None, list(overrides))
    return dict(caught.value.problems)


@pytest.mark.parametrize(
    ("terms", "key", "words"),
    [
        ("[{name: math_anwser}]", "terms.0.name", ["math_anwser", "did you mean 'math_answer'"]),
        ("[{name: pool}]", "terms.0.name", ["no reward 'pool'"]),
        ("[{name: 'no_such_module:f'}]", "terms.0.name", ["no_such_module"]),
        (f"[{{name: '{USER}:wher'}}]", "terms.0.name", ["wher", "where"]),
        ("[{name: 'nowhere.py:f'}]", "terms.0.name", ["nowhere.py"]),
        (f"[{{name: '{USER}:asynchronous'}}]", "terms.0.name", ["not a plain function"]),
        (f"[{{name: '{USER}:Counter'}}]", "terms.0.name", ["not a plain function"]),
        ("[{name: math_answer, args: {glod: x}}]", "terms.0.args.glod", ["did you mean 'gold'"]),
        (
            "[{name: math_answer, args: {completions: x}}]",
            "terms.0.args.completions",
            ["filled by the program"],
        ),
        ("[{name: math_answer, args: {fallback: any}}]", "terms.0.args", ["any", "phrase"]),
        ("[{name: format, args: {tags: think}}]", "terms.0.args", ["think", "list of names"]),
        ("[{name: format, args: {tags: [a], pattern: b}}]", "terms.0.args", ["exclude each other"]),
        ("[{name: format, args: {pattern: '(a'}}]", "terms.0.args", ["(a", "regular expression"]),
        ("[{name: length}]", "terms.0.args", ["target", "start and limit"]),
        ("[{name: length, args: {start: 9, limit: 9}}]", "terms.0.args", ["start < limit"]),
        ("[{name: length, args: {target: 1.5}}]", "terms.0.args.target", ["a whole number"]),
        ("[{name: length, args: {target: 9}, weight: .nan}]", "terms.0.weight", ["finite"]),
        ("[{name: length, args: {target: 9}, weight: 0}]", "terms.0.weight", ["other than 0"]),
        ("[{name: format, label: a/b}]", "terms.0.label", ["'/'"]),
        ("[{name: format, label: mean}]", "terms.0.label", ["reward/mean", "another label"]),
        ("[{name: format, label: zero_spread_fraction}]", "terms.0.label", ["another label"]),
        ("[{name: format, label: environment}]", "terms.0.label", ["another label"]),
        (f"[{{name: '{USER}:mean'}}]", "terms.0.label", ["reward/mean", "another label"]),
        ("[{name: format}, {name: format, args: {tags: [a]}}]", "terms", ["2 terms", "label"]),
        ("[{name: reward_model}]", "terms.0.args.path", ["not given", "folder"]),
        ("[{name: reward_model, args: {path: x, max_token: 9}}]", "terms.0.args.max_token", ["max_tokens"]),
        ("[{name: reward_model, args: {path: x, batch_rows: 0}}]", "terms.0.args.batch_rows", ["at least 1"]),
        ("[{name: reward_model, args: {path: x}, per_sample: true}]", "terms.0.per_sample", ["no effect"]),
    ],
)
def test_bad_terms(terms, key, words):
    problems = refused(f"terms={terms}")
    assert list(problems) == [key]
    assert all(word in problems[key] for word in words), problems


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("workers=-1", "workers", ["-1", "0"]),
        ("timeout_seconds=-2", "timeout_seconds", ["-2", "positive"]),
        ("timeout_seconds=.inf", "timeout_seconds", ["finite"]),
        ("timeout_seconds=0", "timeout_seconds", ["positive"]),
        ("on_error=ignore", "on_error", ["ignore", "abstain"]),
        ("task_term=formt", "task_term", ["formt", "did you mean 'format'"]),
        ("pass_threshold=.nan", "pass_threshold", ["finite"]),
        ("term=3", "term", ["terms"]),
    ],
)
def test_bad_settings(override, key, words):
    problems = refused("terms=[{name: format}]", override)
    assert list(problems) == [key]
    assert all(word in problems[key] for word in words), problems


def test_all_problems_are_listed_at_once():
    problems = refused("terms=[{name: lenght}, {name: format, args: {tag: [a]}}]", "workers=-1")
    assert set(problems) == {"terms.0.name", "terms.1.args.tag", "workers"}


def test_good_settings():
    terms = [
        "{name: math_answer, args: {gold: solution}}",
        "{name: length, args: {target: 100}, weight: 0.1, label: short}",
        f"{{name: '{USER}:with_everything', args: {{whatever: 1}}}}",
        "{name: reward_model, args: {path: rm}}",
    ]
    config, _ = load(RewardsConfig, None, [f"terms=[{', '.join(terms)}]"])
    assert [term.title for term in config.terms] == [
        "math_answer",
        "short",
        "with_everything",
        "reward_model",
    ]
    assert config.task == "math_answer"
    assert [term.title for term in config.given_terms] == ["reward_model"]


def test_unknown_names_list_the_built_ins():
    (message,) = refused("terms=[{name: pool}]").values()
    assert "['arithmetic', 'exact_match', 'format', 'length', 'math_answer'] and reward_model" in message


def test_no_label_takes_the_place_of_a_metric():
    """Every metric ``reward/...`` that the program itself writes, found in its text."""
    files = Path(jaxrl.__file__).parent.rglob("*.py")
    own = {name for file in files for name in re.findall(r'"reward/(\w+)"', file.read_text())}
    assert {"mean", "std", "errors", "abstained_fraction", "overlong_penalty"} <= own
    for name in own:
        assert list(refused(f"terms=[{{name: format, label: {name}}}]")) == ["terms.0.label"]


def test_a_user_module_that_raises_is_user_code(tmp_path):
    file = tmp_path / "broken_rewards.py"
    file.write_text("raise RuntimeError('at import')\n")
    with pytest.raises(UserCodeError, match="at import"):
        load(RewardsConfig, None, [f"terms=[{{name: '{file}:f'}}]"])
