"""What can never happen is refused at the start: completions that cannot end, tags that cannot appear."""

import json

import jax
import pytest
import tokenizers

from jaxrl.config import ConfigError
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.run.settings import parse
from jaxrl.run.setup import set_up

THINK = ["<think>", "</think>"]
TAGS = "rewards.terms=[{name: format, args: {tags: [think]}}]"
EXACT = "rewards.terms=[{name: exact_match}]"
OPENS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        first = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: first)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The built-in tokenizer's folder as it is, with tags that are special tokens, and without eos."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name in ("plain", "tags", "endless"):
        load_tokenizer("builtin:chars").save(root / name)
    backend = tokenizers.Tokenizer.from_file(str(root / "tags/tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in THINK])
    backend.save(str(root / "tags/tokenizer.json"))
    (root / "endless/generation_config.json").unlink()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = json.loads((root / "endless" / name).read_text())
        content.pop("eos_token")
        (root / "endless" / name).write_text(json.dumps(content))
    return root


def parts(folder, *overrides):
    scratch = "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    argv = [f"model.scratch={scratch}", f"model.tokenizer={folder}", "steps=1"]
    config, _ = parse([*argv, *overrides], prog="test", description="")
    return set_up(config)


def test_stop_ids_are_the_models_the_templates_and_the_users(folders, tmp_path):
    ids = {text: load_tokenizer(str(folders / "tags")).encode(text)[0] for text in ("<eos>", "</think>", "!")}
    assert parts(folders / "tags", EXACT).stop_ids == (ids["<eos>"],)
    chosen = parts(
        folders / "tags", EXACT, f"rollout.stop_token_ids=[{ids['!']}]", "rollout.stop=['</think>']"
    )
    assert chosen.stop_ids == (ids["<eos>"], ids["!"], ids["</think>"])
    assert chosen.engine().stop_ids == tuple(sorted(chosen.stop_ids))
    assert parts(folders / "tags", EXACT, "rollout.ignore_eos=true").stop_ids == ()
    (tmp_path / "t.jinja").write_text(OPENS.replace("<eos>", "</think>"))
    by_template = parts(folders / "tags", EXACT, f"data.chat_template={tmp_path}/t.jinja")
    assert by_template.stop_ids == (ids["<eos>"], ids["</think>"])


@pytest.mark.parametrize(
    ("folder", "overrides", "said"),
    [
        ("endless", [EXACT, "data.chat_template=none"], "rollout.stop_token_ids: no completion could end"),
        ("endless", [EXACT, "data.chat_template=none", "rollout.stop=['!']"], None),
        ("endless", [EXACT, "data.chat_template=none", "rollout.stop_token_ids=[9]"], None),
        ("endless", [EXACT, "data.chat_template=none", "rollout.ignore_eos=true"], None),
        ("endless", ["algo.name=sft", "data.chat_template=none"], None),  # samples nothing
        ("plain", [EXACT, "rollout.stop_token_ids=[104]"], "rollout.stop_token_ids: 104 is never sampled"),
        ("plain", [EXACT, "rollout.stop=['<eos>']"], None),
        ("plain", [EXACT, "rollout.stop=['a<|user|>']"], r"rollout.stop: .*'<\|user\|>' is a special token"),
        ("plain", [EXACT, "rollout.stop=['a<|user|>']", "rollout.keep_special_tokens=true"], None),
        ("plain", [TAGS], None),
        (
            "plain",
            [TAGS, "rollout.stop=['</think>']"],
            "rewards.terms.0: 'format' waits for '</think>'.* ends",
        ),
        ("plain", [TAGS, "rollout.stop=['ink>']"], "rewards.terms.0: 'format' waits for '<think>'.*'ink>'"),
        ("plain", [TAGS, "rollout.stop=['</think>!']"], None),
        ("plain", [EXACT.replace("exact_match", "format"), "rollout.stop=['##']"], "waits for '####'"),
        ("tags", [TAGS], "rewards.terms.0: 'format' waits for '<think>'.*special token"),
        ("tags", [TAGS, "rollout.keep_special_tokens=true"], None),
        (
            "tags",
            [TAGS, "rollout.keep_special_tokens=true", "rollout.stop=['</think>']"],
            "ends before '</think>'",
        ),
        (
            "tags",
            [TAGS, "rollout.keep_special_tokens=true", "rollout.stop_token_ids=[105]"],
            "before '</think>'",
        ),
        ("tags", [EXACT], None),
    ],
)
def test_what_can_never_happen_is_refused(folders, folder, overrides, said):
    if said is None:
        parts(folders / folder, *overrides)
    else:
        with pytest.raises(ConfigError, match=said):
            parts(folders / folder, *overrides)


def test_stop_ids_of_which_none_is_sampled(folders, tmp_path):
    """The generation config may list ids that the tokenizer does not have."""
    load_tokenizer(str(folders / "endless")).save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128009, 300]}))
    with pytest.raises(ConfigError, match=r"no completion could end .* 0 to 103 .*\[128009, 300\]"):
        parts(tmp_path, EXACT, "data.chat_template=none")


def test_a_tag_that_the_prompt_opens_need_not_appear(folders, tmp_path):
    (tmp_path / "t.jinja").write_text(OPENS)
    stop = "rollout.stop=['<think>']"
    parts(folders / "plain", TAGS, stop, f"data.chat_template={tmp_path}/t.jinja")
    parts(folders / "plain", TAGS, stop, "data.chat_template=none", "data.prompt={question}<think>")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ messages[0].content }}{% if messages[1] %}{{ messages[1].content + '<|user|>' }}{% endif %}",
            "'<|user|>' (5)",
        ),
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
            "the stop ids are '<eos>' (2), and rows that hold none teach no end",
        ),
        ("{% for m in messages %}{{ m.content }}<eos>{% endfor %}", ""),
    ],
)
def test_where_the_template_and_the_stop_ids_differ_is_said(folders, tmp_path, caplog, template, said):
    (tmp_path / "t.jinja").write_text(template)
    with caplog.at_level("INFO", "jaxrl"):
        parts(folders / "plain", "algo.name=sft", f"data.chat_template={tmp_path}/t.jinja")
    assert said in caplog.text and bool(said) == ("chat template" in caplog.text)
