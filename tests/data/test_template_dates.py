"""Chat templates that print today's date print the run's."""

import datetime

import pytest
from transformers.utils import chat_template_utils

from jaxrl.config import ConfigError, from_dict
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import load_tokenizer

LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}"
    "{%- endif %}{%- endif %}{{ 'Today Date: ' + date_string + '\n' }}"
    "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
)
DATE = "2031-03-09"


@pytest.fixture
def theirs(monkeypatch):
    """The tokenizer of transformers on the day DATE, early in the morning."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls):
            return cls.fromisoformat(DATE)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    return load_tokenizer("builtin:chars").hf


@pytest.mark.parametrize("template", [LLAMA, LLAMA.replace("'%d %b %Y'", 'format = "%A, %H:%M" ')])
def test_the_days_prompts_are_those_of_transformers(theirs, template, tmp_path):
    (tmp_path / "t.jinja").write_text(template)
    data = DataConfig(chat_template=str(tmp_path / "t.jinja"), chat_template_date=DATE)
    prompt = Renderer(data, load_tokenizer("builtin:chars")).prompt({"question": "1+1"})
    messages = [{"role": "user", "content": "1+1"}]
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert prompt.text == expected and ("Mar" in expected or "Sunday, 00:00" in expected)


def test_a_date_whose_form_is_computed_is_refused(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% set form = '%Y' %}{{ strftime_now(form) }}{{ messages[0].content }}"
    )
    data = DataConfig(chat_template=str(tmp_path / "t.jinja"), chat_template_date=DATE)
    with pytest.raises(ConfigError, match=r"data.chat_template: .*form that it computes"):
        Renderer(data, load_tokenizer("builtin:chars"))


def test_a_date_is_written_as_one():
    with pytest.raises(ConfigError, match=r"chat_template_date: '9.3.2031' must be a date"):
        from_dict(DataConfig, {"chat_template_date": "9.3.2031"}, "data")
