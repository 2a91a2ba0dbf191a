"""The report of a run: every plot, nothing from outside, untrusted text escaped, broken files named."""

import html.parser
import json
import re
import shutil
import xml.etree.ElementTree

import numpy as np
import pytest

from jaxrl.config import ConfigError, run_cli
from jaxrl.record.metrics import MetricsConfig, MetricsWriter
from jaxrl.record.report import summary, write_report
from jaxrl.record.report.drawing import DARK, LIGHT, smooth, thin
from jaxrl.record.report.plots import PLOTS
from jaxrl.record.report.run import Run
from jaxrl.report import main

ALL_METRICS = """
reward/mean reward/std reward/math reward/format reward/errors rollout/pass_at_1 rollout/length_mean
rollout/truncated_fraction algo/kl algo/kl_old algo/entropy algo/clip_fraction algo/clip_low_fraction
algo/clip_high_fraction algo/ratio_mean algo/ratio_max algo/zero_spread_fraction sampler/kl
sampler/log_prob_diff_mean sampler/log_prob_diff_max loss/policy optim/grad_norm optim/learning_rate
optim/skipped time/rollout_seconds time/update_seconds time/rewards_seconds time/step_seconds
throughput/rollout_tokens_per_second throughput/update_tokens_per_second memory/peak_bytes
memory/host_bytes memory/live_bytes compile/count
""".split()
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x07\u2028"


def metrics_of(step, last):
    rng = np.random.default_rng(step)
    found = {name: float(rng.uniform(0.2, 0.8)) for name in ALL_METRICS}
    found |= {"memory/peak_bytes": 3e9, "memory/host_bytes": 2e9, "memory/live_bytes": 1e9}
    found |= {"time/rollout_seconds": 2.0, "time/update_seconds": 1.0, "time/step_seconds": 3.5}
    found |= {"throughput/rollout_tokens_per_second": 1000.0, "optim/skipped": 0.0, "reward/errors": 0.0}
    if step in (0, last):
        found |= {"eval/pass_at_1": 0.25 if step == 0 else 0.75, "eval/pass_at_8": 0.9, "eval/maj_at_8": 0.8}
    return found


def make_run(folder, steps=40, resume_at=None, only=None, sample=None):
    """A run as the writer leaves it."""
    row = {"prompt": "What is 2+2?", "completion": "It is 4.", "answer": "4", "reward": 1.0}
    row |= {"rewards": {"math": 1.0}, "stop_reason": "stop", "length": 5} | (sample or {})
    segments = [(0, steps + 1, None)]
    if resume_at is not None:
        segments = [(0, resume_at + 3, None), (resume_at + 1, steps + 1, resume_at)]
    for first, end, resume_step in segments:
        with MetricsWriter(folder, MetricsConfig(tensorboard=False), resume_step=resume_step) as writer:
            for step in range(first, end):
                found = metrics_of(step, steps)
                writer.log(step, {n: v for n, v in found.items() if only is None or n in only})
                writer.samples(step, [row | {"completion": f"{row['completion']} (step {step})"}])
    (folder / "config.yaml").write_text(f"name: {folder.name}\noptim:\n  learning_rate: {1 / steps:.3g}\n")
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "whole", resume_at=20)


@pytest.fixture(scope="module")
def page(run_dir):
    return write_report(run_dir).read_text()


class Outline(html.parser.HTMLParser):
    """Checks that tags close in order, and collects attributes and figures."""

    VOID = ("meta", "br", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.tags = [], [], set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def figures(text):
    return dict(re.findall(r'<figure id="plot-([^"]+)">(.*?)</figure>', text, flags=re.DOTALL))


def test_the_page_has_every_plot_as_valid_svg(page):
    found = figures(page)
    assert [plot.key for plot in PLOTS if plot.key not in found] == []
    for plot in PLOTS:
        (svg,) = re.findall(r"<svg.*?</svg>", found[plot.key], flags=re.DOTALL)
        root = xml.etree.ElementTree.fromstring(svg)
        assert root.get("aria-label") == plot.title
        drawn = root.findall(".//{http://www.w3.org/2000/svg}path")
        assert any("var(--c" in path.get("style", "") for path in drawn), plot.key
        assert plot.title in found[plot.key]


def test_ids_are_unique_and_references_resolve(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', page):
        assert reference in ids


def test_the_page_loads_nothing_and_runs_nothing(page):
    outline = Outline(page)
    assert not outline.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for name, value in outline.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action"):
            assert value.startswith("#")
        assert "url(" not in (value or "") or "url(#" in value
    assert "default-src 'none'" in page
    assert "@import" not in page and "url(http" not in page


def test_colours_follow_the_theme(page):
    used = set(re.findall(r"var\((--[a-z0-9]+)\)", page))
    light, dark = re.findall(r":root\{(.*?)\}", page)
    for theme in (light, dark):
        assert used <= set(re.findall(r"(--[a-z0-9]+):", theme))
    assert "#0102" not in page


def test_lines_can_be_seen_on_their_background():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(one, other):
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for palette, background in ((LIGHT, "#ffffff"), (DARK, "#161b22")):
        assert contrast(palette.ink, background) >= 4.5  # WCAG 2.1, 1.4.3: text
        assert min(contrast(c, background) for c in palette.lines) >= 3  # 1.4.11: graphics
        assert len(set(palette.lines)) == len(palette.lines)


def test_the_summary_says_before_and_after(run_dir, page):
    text = summary(run_dir)
    assert re.search(r"Held-out pass@1 +25.0% → 75.0% +\(\+50.0 points\)", text)
    assert re.search(r"Steps +40 ", text)
    assert "resumed after step 20" in text
    assert re.search(r"Tokens sampled +82k", text)  # 41 lines of 2 s at 1000 per second
    assert "25.0% → 75.0%" in page and "resumed after step 20" in page


def test_samples_config_and_versions_are_there(page):
    for step in (0, 20, 40):
        assert f"Step {step}</summary>" in page and f"(step {step})" in page
    assert "What is 2+2?" in page and "learning_rate: 0.025" in page
    assert "<th>jax</th>" in page and "resume step=20" in page


def test_missing_metrics_leave_their_plot_out(tmp_path):
    run = make_run(tmp_path / "sft", only={"loss/policy", "optim/learning_rate", "time/step_seconds"})
    found = figures(write_report(run).read_text())
    assert set(found) == {"loss", "learning_rate"}


def test_metrics_of_the_user_are_drawn_too(tmp_path):
    name = "mine/cost_$x{0}<b>"
    with MetricsWriter(tmp_path / "run", MetricsConfig(tensorboard=False)) as writer:
        for step in range(3):
            writer.log(step, {name: step})
    text = write_report(tmp_path / "run").read_text()
    Outline(text)
    assert "Other metrics (1)" in text
    assert "mine/cost_$x{0}&lt;b&gt;" in text and "<b>" not in text.split("<main>")[1]


@pytest.mark.parametrize("values", [[0.5], [0.5, None], [None, None], [0.0, 0.0], [1e-38, 3e38], [-1.0, 1.0]])
def test_odd_values_do_not_break_a_plot(tmp_path, values):
    tmp_path = tmp_path / "run"
    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=False)) as writer:
        for step, value in enumerate(values):
            writer.log(step, {name: float("nan") if value is None else value for name in ALL_METRICS})
    Outline(write_report(tmp_path).read_text())


def test_untrusted_text_is_escaped_everywhere(tmp_path):
    sample = {"prompt": EVIL, "completion": EVIL, "answer": EVIL, "stop_reason": EVIL, "length": EVIL}
    run = make_run(
        tmp_path / "<script>x", steps=2, only={"reward/mean"}, sample=sample | {"rewards": {EVIL: 1.0}}
    )
    (run / "config.yaml").write_text(f"name: '{EVIL}'\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": EVIL, "step": 2, "time": 0, "note": EVIL}) + "\n")
    for folders in (run, [run, run]):
        text = write_report(folders, tmp_path / "out.html").read_text()
        outline = Outline(text)
        assert not outline.tags & {"script", "img"}
        assert not [name for name, _ in outline.attributes if name.startswith("on")]
        assert "<script" not in text and "&lt;script&gt;alert(1)" in text
        assert "\x07" not in text


def test_long_samples_are_cut_on_the_page(tmp_path):
    run = make_run(tmp_path / "run", steps=2, only={"reward/mean"}, sample={"prompt": "ab" * 4000})
    text = write_report(run).read_text()
    assert "characters ..." in text and "ab" * 2001 not in text


def test_several_runs_are_drawn_together(tmp_path, run_dir):
    other = make_run(tmp_path / "other", steps=10)
    text = write_report([run_dir, other], tmp_path / "both.html", png=tmp_path / "both.png").read_text()
    Outline(text)
    found = figures(text)
    assert {plot.key for plot in PLOTS} <= set(found)
    for name in ("whole", "other"):
        assert text.count(name) >= 3
    assert "optim.learning_rate" in text and "0.025" in text and "0.1" in text
    assert "Samples of whole" in text and "Samples of other" in text
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_run_that_is_being_written_can_be_read(tmp_path, run_dir):
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "reward/me')
    (copy / "samples" / "step_000040.jsonl").write_text('{"prompt": "torn')
    assert Run(copy).curves.steps[-1] == 40
    Outline(write_report(copy).read_text())


def test_steps_are_merged_and_numbers_come_back_exactly(tmp_path):
    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=False)) as writer:
        writer.log(1, {"a": 1 / 3})
        writer.log(1, {"b": 2.0})
        writer.log(2, {"a": float("nan")})
    curves = Run(tmp_path).curves
    assert curves.steps.tolist() == [1, 2]
    np.testing.assert_array_equal(curves.values["a"], [1 / 3, np.nan])
    np.testing.assert_array_equal(curves.values["b"], [2.0, np.nan])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"event": "start", "step": 0}\n', "no complete step"),
        ('{"step": 1, "reward/me', "no complete step"),
        ('{"step": 1, "a": 1}\nrubbish\n{"step": 2, "a": 1}\n', "line 2"),
        ('{"step": "x", "a": 1}\n{"step": 2, "a": 1}\n', "line 1"),
        ('[1, 2]\n{"step": 2, "a": 1}\n', "line 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        write_report(tmp_path)
    assert str(tmp_path / "metrics.jsonl") in str(error.value)
    assert run_cli(main, [str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_the_command_writes_page_and_picture(run_dir, tmp_path, capsys):
    out, png = tmp_path / "deep" / "page.html", tmp_path / "docs" / "picture.png"
    assert run_cli(main, [str(run_dir), "--output", str(out), "--png", str(png)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")
    data = png.read_bytes()
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width > 1200 and height > 800


def test_smoothing_keeps_constants_and_follows_trends():
    np.testing.assert_allclose(smooth(np.full(100, 0.7)), 0.7)
    line = np.linspace(0, 1, 300)
    np.testing.assert_allclose(smooth(line)[30:-30], line[30:-30], atol=1e-9)
    noise = np.random.default_rng(0).normal(size=600)
    assert smooth(noise).std() < 0.4 * noise.std()


def test_thinning_keeps_the_mean():
    values = np.random.default_rng(0).normal(size=1200)
    assert len(thin(values, 100)) == 100
    assert thin(values, 100).mean() == pytest.approx(values.mean())
    assert thin(values, 5000) is values
