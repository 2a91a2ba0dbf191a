"""The record of a run over resumes; bounded samples; TensorBoard; W&B; timers; memory; compilations."""

import itertools
import json
import logging
import re
import socket
import struct
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl.compile.compilations import CompilationCounter
from jaxrl.config import ConfigError
from jaxrl.record.metrics import (
    MetricsConfig,
    MetricsWriter,
    PhaseTimer,
    ProfileConfig,
    Profiler,
    memory_metrics,
    sample_files,
)
from jaxrl.record.prometheus import PrometheusEndpoint

PLAIN = MetricsConfig(tensorboard=False)


def records(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def logged_steps(run_dir):
    return [r["step"] for r in records(run_dir) if "event" not in r]


def write_steps(run_dir, steps, config=PLAIN, **kwargs):
    with MetricsWriter(run_dir, config, **kwargs) as writer:
        for step in steps:
            writer.log(step, {"reward/mean": step / 10})
            writer.samples(step, [{"prompt": "p", "completion": str(step), "reward": 1.0}])


def test_a_step_is_one_line_with_sorted_names_and_exact_numbers(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.log(1, {"b": jnp.float32(0.1), "a": np.int64(3), "c": 1 / 3, "d": True, "e": jnp.int32(7)})
    start, step = records(tmp_path)
    assert list(step) == ["step", "time", "a", "b", "c", "d", "e"]
    assert (step["a"], step["c"], step["d"], step["e"]) == (3, 1 / 3, 1, 7)
    assert np.float32(step["b"]) == np.float32(0.1)
    assert abs(step["time"] - time.time()) < 60
    assert start["event"] == "start"
    assert start["versions"]["jax"] == jax.__version__


def test_nan_and_infinities_become_null_and_the_file_stays_strict_json(tmp_path):
    with MetricsWriter(tmp_path, MetricsConfig()) as writer:
        writer.log(1, {"nan": float("nan"), "inf": np.float32(np.inf), "fine": 1.0})
        writer.samples(1, [{"prompt": "p", "reward": float("nan"), "rewards": {"a": np.float64("inf")}}])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=refuse)
    assert (step["nan"], step["inf"], step["fine"]) == (None, None, 1.0)
    row = json.loads((tmp_path / "samples/step_000001.jsonl").read_text(), parse_constant=refuse)
    assert row == {"prompt": "p", "reward": None, "rewards": {"a": None}}


@pytest.mark.parametrize("value", ["0.5", None, [1.0], np.ones(2)])
def test_what_is_no_number_is_refused_by_name(tmp_path, value):
    with MetricsWriter(tmp_path, PLAIN) as writer, pytest.raises((TypeError, ValueError)):
        writer.log(1, {"reward/mean": value})


def test_steps_only_go_up(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.log(5, {"a": 1})
        with pytest.raises(ValueError, match="step 4 logged after step 5"):
            writer.log(4, {"a": 1})


@pytest.mark.parametrize("resume_step", [0, 1, 6, 10])
def test_a_resumed_file_has_every_step_once(tmp_path, resume_step):
    write_steps(tmp_path, range(1, 11))
    write_steps(tmp_path, range(resume_step + 1, 13), resume_step=resume_step)
    assert logged_steps(tmp_path) == list(range(1, 13))
    assert list(sample_files(tmp_path)) == list(range(1, 13))
    marks = [r for r in records(tmp_path) if r.get("event") == "resume"]
    assert [r["step"] for r in marks] == [resume_step]
    at = records(tmp_path).index(marks[0])
    assert [r["step"] for r in records(tmp_path)[:at] if "event" not in r] == list(range(1, resume_step + 1))


def test_a_line_torn_at_any_byte_is_repaired_on_resume(tmp_path, caplog):
    write_steps(tmp_path, range(1, 4))
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    last_line = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last_line, len(whole)):
        file.write_bytes(whole[:cut])
        with caplog.at_level(logging.WARNING, "jaxrl"):
            write_steps(tmp_path, [3, 4], resume_step=2)
        assert logged_steps(tmp_path) == [1, 2, 3, 4], cut
    assert "torn" in caplog.text


def test_garbage_in_the_middle_does_not_stop_a_resume(tmp_path):
    write_steps(tmp_path, range(1, 4))
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], b'\x00\x00{"step": 1, "re\xff\n', *lines[2:]]))
    write_steps(tmp_path, [4], resume_step=3)
    assert logged_steps(tmp_path) == [1, 2, 3, 4]


def test_a_resume_without_an_old_file_begins_one(tmp_path):
    write_steps(tmp_path, [8, 9], resume_step=7)
    assert logged_steps(tmp_path) == [8, 9]


def test_a_new_run_in_an_old_folder_sets_the_old_files_aside(tmp_path):
    for reward in (1.0, 2.0, 3.0):
        with MetricsWriter(tmp_path, PLAIN) as writer:
            writer.log(1, {"reward/mean": reward})
            writer.samples(1, [{"prompt": str(reward)}])
    assert records(tmp_path)[-1]["reward/mean"] == 3.0
    old = (tmp_path / "metrics.jsonl.old").read_text()
    assert json.loads(old.splitlines()[-1])["reward/mean"] == 2.0
    assert json.loads((tmp_path / "samples.old/step_000001.jsonl").read_text()) == {"prompt": "2.0"}


def test_only_the_enabled_process_writes(tmp_path):
    write_steps(tmp_path / "run", [1, 2], enabled=False)
    assert not (tmp_path / "run").exists()


def test_events_are_lines_of_their_own(tmp_path):
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.log(1, {"a": 1})
        writer.event("checkpoint", step=1, path=tmp_path / "1", score=float("nan"))
    event = records(tmp_path)[-1]
    assert (event["event"], event["step"], event["score"]) == ("checkpoint", 1, None)
    assert str(tmp_path) in event["path"]


def test_samples_are_bounded_in_rows_and_characters(tmp_path):
    config = MetricsConfig(tensorboard=False, samples_per_step=3, sample_characters=100)

    def rows():
        for i in range(1000):
            assert i < 4, "rows beyond the limit are not even made"
            text = f"begin{i}" + "x" * 10_000 + "end"
            yield {
                "prompt": text,
                "completion": "short",
                "rewards": {"math": np.float32(0.5)},
                "ids": np.arange(9999),
            }

    with MetricsWriter(tmp_path, config) as writer:
        writer.samples(7, rows())
    lines = (tmp_path / "samples/step_000007.jsonl").read_text().splitlines()
    assert len(lines) == 3
    row = json.loads(lines[1])
    assert row["prompt"].startswith("begin1") and row["prompt"].endswith("end")
    assert len(row["prompt"]) < 150 and "9" in row["prompt"] and "cut" in row["prompt"]
    assert (row["completion"], row["rewards"]) == ("short", {"math": 0.5})
    assert all(len(line) < 1000 for line in lines)


def test_samples_survive_any_text(tmp_path):
    text = "a\n\u2028\x00\ud800</script>\t漢字"
    with MetricsWriter(tmp_path, PLAIN) as writer:
        writer.samples(1, [{"prompt": text, "answer": None, "stop_reason": "stop", "length": 3}])
    (line,) = (tmp_path / "samples/step_000001.jsonl").read_bytes().rstrip(b"\n").split(b"\n")
    row = json.loads(line)
    assert row["prompt"].replace("?", "\ud800") == text
    assert (row["answer"], row["length"]) == (None, 3)


def test_samples_of_old_steps_thin_out_but_first_and_latest_stay(tmp_path):
    config = MetricsConfig(tensorboard=False, samples_keep_steps=10)
    with MetricsWriter(tmp_path, config) as writer:
        for step in range(1, 101):
            writer.samples(step, [{"prompt": "p"}])
            assert len(sample_files(tmp_path)) <= 10
    kept = list(sample_files(tmp_path))
    assert len(kept) == 10
    assert kept[0] == 1
    assert kept[-5:] == [96, 97, 98, 99, 100]
    assert max(b - a for a, b in itertools.pairwise(kept)) < 60


def test_no_samples_when_none_are_wanted(tmp_path):
    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=False, samples_per_step=0)) as writer:
        writer.samples(1, [{"prompt": "p"}])
    assert not (tmp_path / "samples").exists()


def read_events(folder):
    """What TensorBoard shows: points of each tag, those dropped that a later segment purges."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points = []
    for path in sorted(folder.iterdir(), key=lambda p: int(p.name.rsplit(".", 1)[-1])):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                points = [p for p in points if p[0] < event.step]
            points += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return points


def test_tensorboard_shows_every_step_once(tmp_path):
    config = MetricsConfig(tensorboard=True)
    write_steps(tmp_path, range(1, 8), config)
    write_steps(tmp_path, range(5, 10), config, resume_step=4)
    points = read_events(tmp_path / "tensorboard")
    assert [(step, tag) for step, tag, _ in points] == [(step, "reward/mean") for step in range(1, 10)]
    np.testing.assert_allclose([value for _, _, value in points], np.arange(1, 10) / 10, rtol=1e-6)


def test_wandb_missing_is_an_error_with_the_key_and_leaves_the_folder_alone(tmp_path, monkeypatch):
    write_steps(tmp_path, [1])
    before = sorted(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"metrics\.wandb.*jaxrl\[wandb\]"):
        MetricsWriter(tmp_path, MetricsConfig(wandb="project"))
    assert sorted(tmp_path.iterdir()) == before


def test_wandb_gets_the_numbers_and_resumes_the_same_run(tmp_path, monkeypatch):
    inits, logs, defined, finished = [], [], [], []
    run = types.SimpleNamespace(
        log=logs.append,
        define_metric=lambda *a, **k: defined.append((a, k)),
        finish=lambda: finished.append(1),
    )
    fake = types.SimpleNamespace(init=lambda **kwargs: inits.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = MetricsConfig(tensorboard=False, wandb="project")
    write_steps(tmp_path, [1, 2], config, run_config={"seed": 1})
    write_steps(tmp_path, [2], config, resume_step=1)
    assert [i["project"] for i in inits] == ["project"] * 2
    assert inits[0]["id"] == inits[1]["id"] and inits[1]["resume"] == "allow"
    assert inits[0]["config"] == {"seed": 1}
    assert logs == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2},
        {"step": 2, "reward/mean": 0.2},
    ]
    assert (("*",), {"step_metric": "step"}) in defined
    assert len(finished) == 2
    write_steps(tmp_path, [1], config)  # a new run in the folder is a new run there too
    assert inits[2]["id"] != inits[0]["id"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (MetricsConfig(samples_per_step=-1), "samples_per_step"),
        (MetricsConfig(sample_characters=1), "sample_characters"),
        (MetricsConfig(samples_keep_steps=1), "samples_keep_steps"),
        (MetricsConfig(wandb=" "), "wandb"),
        (ProfileConfig(start_step=-1), "start_step"),
        (ProfileConfig(start_step=1, num_steps=0), "num_steps"),
    ],
)
def test_bad_settings_are_named(section, key):
    assert [name for name, _ in section.problems()] == [key]


def test_defaults_have_no_problems():
    assert not list(MetricsConfig().problems()) + list(ProfileConfig().problems())


def test_phases_add_up_and_start_anew():
    timer = PhaseTimer()
    for tokens in (30, 70):
        with timer.phase("rollout") as phase:
            time.sleep(0.02)
            phase.tokens = tokens
    with timer.phase("rewards"):
        pass
    found = timer.metrics()
    assert set(found) == {
        "time/rollout_seconds",
        "time/rewards_seconds",
        "time/step_seconds",
        "throughput/rollout_tokens_per_second",
    }
    assert 0.04 <= found["time/rollout_seconds"] <= found["time/step_seconds"] < 5
    rate = found["throughput/rollout_tokens_per_second"]
    assert rate * found["time/rollout_seconds"] == pytest.approx(100)
    assert set(timer.metrics()) == {"time/step_seconds"}


def test_a_phase_that_fails_is_still_timed():
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("update"):
        raise KeyError
    assert "time/update_seconds" in timer.metrics()


def test_live_bytes_follow_the_arrays():
    before = memory_metrics()
    array = jnp.ones((1000, 1000), jnp.float32).block_until_ready()
    during = memory_metrics()
    assert during["memory/live_bytes"] - before["memory/live_bytes"] == 4_000_000
    array.delete()
    assert memory_metrics()["memory/live_bytes"] == before["memory/live_bytes"]
    assert 1e7 < during["memory/host_bytes"] <= during["memory/peak_bytes"] * 1.01


def test_compilations_are_counted_until_closed():
    double = jax.jit(lambda x: x * 2.5 + 1)
    inputs = {n: np.ones(n, np.float32) for n in (3, 4, 5)}
    with CompilationCounter() as counter:
        double(inputs[3])
        assert counter.metrics()["compile/count"] >= 1
        double(inputs[3])
        assert counter.metrics() == {"compile/count": 0, "compile/seconds": 0.0}
        double(inputs[4])
        assert counter.count >= 2 and counter.seconds > 0
        total = counter.count
    double(inputs[5])
    assert counter.count == total
    counter.close()


def test_counters_do_not_disturb_each_other():
    first, second = CompilationCounter(), CompilationCounter()
    first.close()
    jax.jit(lambda x: x - 7.5)(np.ones(2, np.float32))
    second.close()
    assert first.count == 0 and second.count >= 1


def test_the_profiler_traces_the_asked_steps(tmp_path):
    profiler = Profiler(tmp_path, ProfileConfig(start_step=2, num_steps=1))
    profiler.step(1)
    assert not (tmp_path / "profile").exists()
    profiler.step(2)
    jnp.ones(3).block_until_ready()
    profiler.step(3)
    traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 0
    profiler.step(4)
    profiler.close()
    assert list((tmp_path / "profile").rglob("*.xplane.pb")) == traces


def test_no_profile_unless_asked(tmp_path):
    profiler = Profiler(tmp_path, ProfileConfig())
    for step in range(5):
        profiler.step(step)
    profiler.close()
    assert not list(tmp_path.iterdir())


def test_importing_the_config_is_light():
    code = (
        "import sys, jaxrl.record.metrics, jaxrl.record.progress, jaxrl.record.report;"
        "heavy = ('matplotlib', 'tensorboardX', 'wandb', 'orbax', 'transformers');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def scrape(port):
    """Metric -> (labels, value) as Prometheus' own parser reads the page."""
    with urllib.request.urlopen(f"http://localhost:{port}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    return {s.name: (s.labels, s.value) for family in families for s in family.samples}


def test_prometheus_gets_each_metric_as_a_gauge_of_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxrl")
    config = MetricsConfig(tensorboard=False, prometheus_port=0)
    with MetricsWriter(tmp_path / "my run", config) as writer:
        writer.log(1, {"reward/mean": 0.25, "time/step_seconds": 2, "reward/my-term": 1.0, "step": 5})
        writer.log(2, {"reward/mean": 0.5, "optim/grad_norm": float("nan"), "reward/my term": 2.0})
        port = int(re.search(r"http://127.0.0.1:(\d+)/metrics", caplog.text)[1])
        assert answers("127.0.0.1", port) and not answers("127.0.0.2", port)
        found = scrape(port)
        with pytest.raises(ConfigError, match=rf"metrics.prometheus_port: {port}: cannot listen"):
            MetricsWriter(tmp_path / "other", MetricsConfig(prometheus_port=port))
    assert all(labels == {"run": "my run"} for labels, _ in found.values())
    values = {name: value for name, (_, value) in found.items()}
    assert values["jaxrl_reward_mean"] == 0.5
    assert values["jaxrl_time_step_seconds"] == 2  # as the last step that had it
    assert np.isnan(values["jaxrl_optim_grad_norm"])
    assert (values["jaxrl_step"], values["jaxrl_steps_total"]) == (2, 2)
    assert values["jaxrl_reward_my_term"] == 1  # first come, first served
    assert "reward/my term is not served to Prometheus: the name jaxrl_reward_my_term is reward/my-term" in (
        caplog.text
    )
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def answers(address, port):
    """Whether something listens there. On Linux 127.0.0.2 is this machine's as well: who listens on 127.0.0.1
    alone does not answer there."""
    with socket.socket() as s:
        return s.connect_ex((address, port)) == 0


def test_prometheus_of_another_machine_is_let_in_when_it_is_asked_for(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxrl")
    config = MetricsConfig(tensorboard=False, prometheus_port=0, prometheus_host="0.0.0.0")
    with MetricsWriter(tmp_path / "run", config) as writer:
        writer.log(1, {"reward/mean": 0.25})
        port = int(re.search(r"http://0.0.0.0:(\d+)/metrics", caplog.text)[1])
        assert answers("127.0.0.2", port)
        assert scrape(port)["jaxrl_reward_mean"] == ({"run": "run"}, 0.25)
    with pytest.raises(ConfigError, match=r"metrics\.prometheus_host: 'no\.such\.host\.invalid'"):
        PrometheusEndpoint(0, "run", "no.such.host.invalid")
    assert [key for key, _ in MetricsConfig(prometheus_host="").problems()] == ["prometheus_host"]


def test_prometheus_is_served_by_the_first_process_alone(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxrl")
    with MetricsWriter(tmp_path, MetricsConfig(prometheus_port=0), enabled=False) as writer:
        writer.log(1, {"reward/mean": 0.25})
    assert caplog.text == ""


def test_prometheus_port_is_checked():
    problems = dict(MetricsConfig(prometheus_port=70000).problems())
    assert problems == {"prometheus_port": "70000: needs a port from 0 to 65535, or null"}
