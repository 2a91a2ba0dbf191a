"""What people see while a run goes on."""

import io
import logging
import sys

import pytest

from jaxrl.record import progress as progress_module
from jaxrl.record.progress import Progress, short

METRICS = {
    "reward/mean": 0.4321,
    "rollout/pass_at_1": 0.25,
    "rollout/length_mean": 87.6,
    "throughput/rollout_tokens_per_second": 12345.0,
    "time/step_seconds": 2.5,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def test_a_log_gets_one_line_a_step_with_what_people_watch(clock):
    out = io.StringIO()
    with Progress(20, stream=out) as progress:
        for step in (1, 2):
            clock.now += 3.0
            progress.step(step, METRICS)
    first, second = out.getvalue().splitlines()
    assert first.startswith("step  1/20") and second.startswith("step  2/20")
    for shown in ("reward  0.432", "pass@1  25.0%", "length    88", "12.3k", "ETA 0:00:54"):
        assert shown in second
    assert "\x1b" not in out.getvalue()


def test_time_left_ignores_a_slow_first_step_and_vanishes_at_the_end(clock):
    with Progress(10, "none", start_step=2) as progress:
        assert progress.eta() == ""
        for step, seconds in zip(range(3, 11), (600, 2, 2, 2, 2, 2, 2, 2), strict=True):
            clock.now += seconds
            progress.step(step, METRICS)
            if step == 6:
                assert progress.eta() == "0:00:08"
        assert progress.eta() == ""


def test_missing_metrics_are_left_out_and_a_loss_stands_in_for_the_reward():
    out = io.StringIO()
    with Progress(5, "plain", stream=out) as progress:
        progress.step(1, {"loss/policy": 1.25})
        progress.step(2, {**METRICS, "loss/policy": 1.25, "eval/pass_at_1": 0.5})
    first, second = out.getvalue().splitlines()
    assert "loss  1.2500" in first and "reward" not in first
    assert "loss" not in second and "held-out 50.0%" in second


def test_a_long_phase_reports_now_and_then_in_a_log(clock):
    out = io.StringIO()
    with Progress(5, "plain", stream=out) as progress:
        for done in range(0, 100):
            progress.update("rollout", done=done, total=100, tokens=50 * done)
            clock.now += 1.0
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "  step 1 rollout 30/100 sequences, 50 tok/s, 0:00:30"


def test_a_terminal_gets_a_live_line_with_steps_and_log_lines_above():
    out = Terminal()
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    stream = handler.stream
    try:
        with Progress(20, stream=out) as progress:
            progress.update("rollout", done=3, total=8, tokens=100)
            progress._live.refresh()
            progress.step(1, METRICS)
    finally:
        logging.getLogger().removeHandler(handler)
    shown = out.getvalue()
    assert "rollout 3/8 sequences" in shown
    assert "step  1/20" in shown and "0.432" in shown and "\x1b[" in shown
    assert handler.stream is stream


@pytest.mark.parametrize(
    "how", [{"mode": "none"}, {"mode": "plain", "enabled": False}, {"mode": "rich", "enabled": False}]
)
def test_nothing_is_shown_when_not_wanted(how):
    out = Terminal()
    with Progress(5, stream=out, **how) as progress:
        progress.update("rollout", done=1, total=2)
        progress.step(1, METRICS)
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.5, "0.5"),
        (12.34, "12.3"),
        (999, "999"),
        (9999, "9999"),
        (12345, "12.3k"),
        (2.5e6, "2.5M"),
        (3e9, "3.0G"),
    ],
)
def test_short_numbers(number, text):
    assert short(number) == text
