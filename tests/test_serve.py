"""python -m jaxrl.serve where it cannot serve; tests/rollout/test_jetstream.py has the server itself."""

import sys

import pytest

from jaxrl import serve
from jaxrl.config import ConfigError


def test_without_the_package_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jetstream", None)
    monkeypatch.delitem(sys.modules, "jaxrl.rollout.jetstream", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'jaxrl\[jetstream\]'"):
        serve.main(["--protocol", "jetstream", "--model", str(tmp_path)])


def test_an_unknown_protocol_lists_those_there_are():
    with pytest.raises(ConfigError, match="jetstream"):
        serve.main(["--protocol", "http", "--model", "somewhere"])
