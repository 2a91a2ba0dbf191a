"""Chat templates that never end, and those that only look like it."""

import threading

import pytest

from jaxrl.config import ConfigError
from jaxrl.data import template_limits
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import load_tokenizer

HUGE = "range(99999)"  # the sandbox refuses a range of 100000
ENDLESS = {
    "loops in loops": (
        f"{{% for i in {HUGE} %}}{{% for j in {HUGE} %}}{{% endfor %}}{{% endfor %}}",
        "turns",
    ),
    "a loop that chooses nothing": (
        f"{{% for i in {HUGE} %}}{{% for j in {HUGE} if false %}}{{% endfor %}}{{% endfor %}}",
        "turns",
    ),
    "loops over a text": (
        "{% for i in messages[0].content %}{% for j in messages[0].content %}x{% endfor %}{% endfor %}",
        "turns",
    ),
    "a loop in a macro": (
        f"{{% macro f() %}}{{% for i in {HUGE} %}}{{% endfor %}}{{% endmacro %}}"
        f"{{% for i in {HUGE} %}}{{{{ f() }}}}{{% endfor %}}",
        "turns",
    ),
    "macros that call macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "turns",
    ),
    "slow turns": (f"{{% for i in {HUGE} %}}{{{{ {HUGE} | list | length }}}}{{% endfor %}}", "seconds"),
    "a long text": (f"{{% for i in {HUGE} %}}{{{{ messages[0].content }}}}{{% endfor %}}", "characters"),
    "a long text kept": (
        "{% set x %}{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
        "characters",
    ),
}


@pytest.fixture
def renderer(tmp_path):
    """renderer(template) -> a Renderer that has it from a file."""
    tokenizer = load_tokenizer("builtin:chars")

    def make(template):
        (tmp_path / "chat.jinja").write_text(template)
        return Renderer(DataConfig(chat_template=str(tmp_path / "chat.jinja")), tokenizer)

    return make


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_TURNS", 20_000)
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(template_limits, "MAX_CHARACTERS", 1_000_000)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(("template", "limit"), ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_refused_by_name(template, limit, in_thread, renderer, small_limits, tmp_path):
    found = []

    def render():
        with pytest.raises(ConfigError) as error:
            renderer(template).prompt({"question": "x" * 2000})
        found.extend(error.value.problems)

    if in_thread:  # where no signal arrives
        thread = threading.Thread(target=render)
        thread.start()
        thread.join()
    else:
        render()
    ((key, message),) = found
    assert key == "data.chat_template" and str(tmp_path / "chat.jinja") in message
    assert "TemplateLimit" in message and f" {limit}" in message


def test_the_limits_change_no_text():
    """By transformers on its own, in a cache of its own."""
    from transformers.utils import chat_template_utils

    template = (
        "{{ bos_token }}{% macro m(x) %}<{{ x }}>{% endmacro %}"
        "{%- for message in messages if message.role != 'system' %}{% set ns = namespace(n=loop.index) %}"
        "{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }} {{ m(message.content) }}"
        "{% if loop.first %}{% continue %}{% endif %}{{ ns.n }}{{ loop.previtem.role }}\n"
        "{% else %}nobody{% endfor %}"
        "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{% generation %}{{ messages[-1].content | upper }}{% endgeneration %}"
        "{% if add_generation_prompt %}go{% endif %}"
    )
    messages = [{"role": r, "content": r[::-1]} for r in ("system", "user", "assistant", "user")]
    tokenizer = load_tokenizer("builtin:chars")
    plain = chat_template_utils._cached_compile_jinja_template(template).render(
        messages=messages, add_generation_prompt=True, **tokenizer.hf.special_tokens_map
    )
    for _ in range(2):
        limited = tokenizer.render(messages, add_generation_prompt=True, chat_template=template)
        assert limited == plain
