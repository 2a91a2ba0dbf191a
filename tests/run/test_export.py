"""What an export says beside the weights: the chat template and the stop ids that were trained with."""

import datetime
import json
import shutil

import jax
import pytest
from transformers import AutoTokenizer, GenerationConfig

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.run.export import save_tokenizer
from jaxrl.run.settings import parse
from jaxrl.run.setup import set_up
from jaxrl.store import hub

# Two variables, today's date, and an end of turn that the fixture's generation config does not list.
TEMPLATE = (
    "\n{%- if strftime_now is defined %}{{ strftime_now('%d %B %Y') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + (' loud' if loud else '') + m.content + '<pad>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' + (style or 'none') }}{% endif %}"
)
ASKED = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.fixture
def model(fixtures, tmp_path):
    shutil.copytree(
        fixtures / "hf/qwen3", tmp_path / "model", ignore=shutil.ignore_patterns("*.npz", "*.safetensors")
    )
    return tmp_path / "model"


def exported(model, *overrides):
    """The parts of a run, and the folder that its export makes beside the weights."""
    argv = [f"model.path={model}", "steps=1", "rewards.terms=[{name: exact_match}]", *overrides]
    parts = set_up(parse(argv, prog="test", description="")[0])
    out = model.parent / "out"
    out.mkdir()
    for name in hub.TOKENIZER_FILES:
        if (model / name).is_file():
            shutil.copyfile(model / name, out / name)
    save_tokenizer(parts, out)
    return parts, out


def listed(folder):
    """The ids that transformers stops at."""
    eos = GenerationConfig.from_pretrained(folder).eos_token_id
    return {*eos} if isinstance(eos, list) else {eos}


def test_transformers_renders_and_stops_as_the_run_did(model):
    (model.parent / "t.jinja").write_text(TEMPLATE)
    parts, out = exported(
        model,
        f"data.chat_template={model.parent}/t.jinja",
        'data.chat_template_args={loud: true, style: "it\'s"}',
        "rollout.stop_token_ids=[7]",
    )
    theirs, generation = AutoTokenizer.from_pretrained(out), GenerationConfig.from_pretrained(out)
    prompt = parts.renderer.prompt({"question": ASKED[0]["content"]})
    options = {"add_generation_prompt": True, "tokenize": False}
    assert theirs.apply_chat_template(ASKED, **options) == prompt.text
    assert prompt.text.startswith(datetime.date.today().strftime("%d %B %Y<|im_start|>user loud"))
    assert prompt.text.endswith("it's")
    assert theirs.apply_chat_template(ASKED, style="other", loud=False, **options).endswith("other")
    assert listed(out) == set(parts.stop_ids) == {2, 4, 0, 7}
    assert generation.temperature == 0.7 and generation.top_k == 20  # the model's own
    again = load_tokenizer(str(out))
    assert set(again.stop_ids) == set(parts.stop_ids)
    assert again.render(ASKED, add_generation_prompt=True) == prompt.text


def test_what_the_run_did_not_change_is_taken_over_as_it_is(model):
    _, out = exported(model)
    names = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= names
    assert all((out / name).read_bytes() == (model / name).read_bytes() for name in names)


def test_the_template_of_another_tokenizer_replaces_the_models(model):
    other = model.parent / "other"
    shutil.copytree(model, other)
    (other / "chat_template.jinja").unlink()
    (other / "generation_config.json").unlink()
    (other / "config.json").unlink()
    settings = json.loads((other / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    parts, out = exported(model, f"model.tokenizer={other}")
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.apply_chat_template(ASKED, tokenize=False) == "What is 3 + 4?<|im_end|>"
    assert listed(out) == set(parts.stop_ids) == {4, 2}


def test_stop_ids_of_config_json_alone_are_written_where_generation_looks(model):
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [4, 9]}))
    parts, out = exported(model, "rollout.ignore_eos=true")  # not how the model is to be used later
    assert parts.stop_ids == ()
    assert listed(out) == {4, 9}
