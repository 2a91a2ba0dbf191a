"""What the documentation says of settings and configurations is what the program does."""

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


def test_links_of_the_documentation_lead_somewhere():
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "deploy").rglob("[A-Z]*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
