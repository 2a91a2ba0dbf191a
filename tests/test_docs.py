"""The documentation: its settings, configurations, links and paths are those of the program."""

import pathlib
import re

import pytest

from jaxrl.config import load, markdown
from jaxrl.run.settings import RunConfig

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml")) + sorted((ROOT / "configs").glob("*.gin"))


def test_the_table_of_settings_is_current():
    """When it is not: write ``jaxrl.config.markdown(jaxrl.run.settings.RunConfig)`` to docs/config.md."""
    assert (ROOT / "docs" / "config.md").read_text().strip() == markdown(RunConfig).strip()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_configs_are_valid(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, _ = load(RunConfig, path)
    assert config.name == path.stem


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
PAGES += (ROOT / "deploy").rglob("[A-Z]*.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_of_the_documentation_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), target
    for path in re.findall(r"(?<![\w/.-])(?:jaxrl|tests|scripts|configs|docs|deploy)/[\w./-]*\w", text):
        assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")), path
