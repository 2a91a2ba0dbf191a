"""What a cluster does when a workload ends, simulated: the rendered rules and the rendered command, here."""

import functools
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from deploy_helpers import FOLDER, argv_of, container_of, dashboard_metrics, manifests
from prometheus_client.parser import text_string_to_metric_families

from jaxrl.record.prometheus import gauge_name

TINY = """
steps: 6
model:
  scratch: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
            num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64}
  tokenizer: builtin:chars
  compute_dtype: float32
  remat: none
mesh: {data: 1}
data: {source: arithmetic, options: {digits: 1, rows: 10}, chat_template: none, max_prompt_tokens: 6,
       prompts_per_step: 2}
rollout: {group_size: 2, max_new_tokens: 4, slots: 4, prefill_chunk_tokens: 8, steps_per_dispatch: 4}
rewards: {terms: [{name: PLACE/rewards.py:even}], workers: 0, on_error: stop}
eval: {every: 3, limit: 2}
algo: {kl_coef: 0.1}
batch: {micro_batch_tokens: 48}
checkpoint: {every: 1}
metrics: {tensorboard: false}
"""
REWARDS = """
import time

def even(token_ids):
    time.sleep(0.2)  # time for a signal
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in token_ids]

def broken(completions):
    raise ValueError("my own mistake")
"""


def simulate(jobset, run_pod):
    """(how the JobSet ends, its restarts) when ``run_pod(restarts)`` is the exit code of its training pod.

    JobSet's and Job's documented rules: the first pod failure policy rule that matches decides about the Job;
    without one its backoffLimit (0) does; the first failure policy rule for the Job's reason decides about
    the JobSet, which restarts otherwise, up to maxRestarts.
    """
    spec = jobset["spec"]
    jobs = [job["template"]["spec"] for job in spec["replicatedJobs"]]
    (job,) = (
        j for j in jobs if any(c["name"] == manifests.CONTAINER for c in j["template"]["spec"]["containers"])
    )
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    restarts = 0
    while code := run_pod(restarts):
        code = code if code > 0 else 128 - code
        reason = "BackoffLimitExceeded"
        for rule in job["podFailurePolicy"]["rules"]:
            inside = code in rule["onExitCodes"]["values"]
            if inside == (rule["onExitCodes"]["operator"] == "In"):
                assert rule["action"] == "FailJob"
                reason = "PodFailurePolicy"
                break
        actions = (r["action"] for r in spec["failurePolicy"]["rules"] if reason in r["onJobFailureReasons"])
        if next(actions, "RestartJobSet") == "FailJobSet" or restarts == spec["failurePolicy"]["maxRestarts"]:
            return "Failed", restarts
        restarts += 1
    return "Completed", restarts


class Node:
    """Runs the training container of a manifest here: its volumes are folders of ``root``."""

    def __init__(self, objects, root):
        self.root = root
        for name, text in objects[0]["data"].items():
            path = self.here("/etc/jaxrl") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("/lustre", str(self.here("/lustre"))))
        self.argv = [
            re.sub(r"(^|=| )(/etc/jaxrl|/lustre)", lambda m: f"{m[1]}{self.here(m[2])}", word)
            for word in argv_of(container_of(objects)[1], {})
        ]
        self.output = ""

    def here(self, path):
        return self.root / path.strip("/")

    def steps(self, run):
        path = self.here("/lustre") / "runs" / run / "metrics.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [line["step"] for line in lines if "event" not in line]

    def run(self, restarts=0, *, watch=None):
        """Exit code of the container; ``watch(process, output so far)`` is called while it runs."""
        log = self.root / f"log.{restarts}"
        with log.open("w") as file:
            process = subprocess.Popen(self.argv, stdout=file, stderr=subprocess.STDOUT, cwd=self.root)
        deadline = time.monotonic() + 900
        while process.poll() is None and time.monotonic() < deadline:
            if watch is not None:
                watch(process, log.read_text())
            time.sleep(0.1)
        self.output = log.read_text()
        process.kill()
        return process.wait()


@pytest.fixture
def start(submitted, tmp_path, monkeypatch):
    """start(*words) -> (JobSet, Node) of the tiny run."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("PLACE", str(tmp_path)))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (programs / "sleep").write_text("#!/bin/bash\nexec /usr/bin/sleep 0.05\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("LUSTRE_INSTANCE", "lus")
    monkeypatch.setenv("MAX_RESTARTS", "3")
    monkeypatch.setenv("TPU", "v6e:2x2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)

    def make(*words):
        objects = submitted(str(tmp_path / "tiny.yaml"), "metrics.prometheus_port=0", *words)
        with monkeypatch.context() as patch:
            patch.setenv("PATH", f"{programs}:/usr/bin:/bin")
            node = Node(objects, tmp_path)
        node.run = functools.partial(with_path, monkeypatch, f"{programs}:/usr/bin:/bin", node.run)
        return objects[-1], node

    return make


def with_path(monkeypatch, path, function, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", path)
        return function(*args, **kwargs)


@pytest.mark.parametrize("code", [1, 75, 76, 137, -9, 139, 143])
def test_interruptions_and_lost_hosts_restart_with_a_cap(code, start):
    jobset, _ = start("--via", "jobset")
    assert simulate(jobset, lambda restarts: code) == ("Failed", 3)
    assert simulate(jobset, lambda restarts: code if restarts < 3 else 0) == ("Completed", 3)


@pytest.mark.parametrize("code", [2, 3])
def test_mistakes_of_the_user_do_not_restart(code, start):
    jobset, _ = start("--via", "jobset")
    assert simulate(jobset, lambda restarts: code) == ("Failed", 0)
    assert simulate(jobset, lambda restarts: 75 if restarts < 2 else code) == ("Failed", 2)


@pytest.mark.slow
@pytest.mark.parametrize("via", ["jobset", "xpk"])
def test_a_run_that_is_interrupted_resumes_and_ends(via, start, request, monkeypatch):
    """Through the container's own command: SIGTERM as the kubelet sends it, 75, restart, the other steps. Its
    metrics are served, and are those that the dashboard asks for."""
    if via == "xpk":
        monkeypatch.setenv("XPK", request.getfixturevalue("xpk"))
    jobset, node = start("--via", via, "name=tiny")
    codes, pages = [], []

    def interrupt(process, output):
        if 2 in node.steps("tiny") and not pages:
            port = int(re.search(r"http://0.0.0.0:(\d+)/metrics", output)[1])
            with urllib.request.urlopen(f"http://localhost:{port}/metrics") as page:
                pages.append(page.read().decode())
            process.send_signal(signal.SIGTERM)

    def run_pod(restarts):
        codes.append(node.run(restarts, watch=None if restarts else interrupt))
        return codes[-1]

    assert simulate(jobset, run_pod) == ("Completed", 1), node.output
    assert codes == [75, 0]
    assert (
        node.steps("tiny") == [0, 1, 2, 3, 4, 5, 6][-len(node.steps("tiny")) :]
        and node.steps("tiny")[-1] == 6
    )
    if via == "jobset":  # the names of metrics do not depend on the way
        lines = map(json.loads, (node.here("/lustre") / "runs/tiny/metrics.jsonl").read_text().splitlines())
        logged = {gauge_name(name) for line in lines if "event" not in line for name in line}
        assert dashboard_metrics() <= logged | {"jaxrl_step", "jaxrl_steps_total"}
    served = {s.name: s.value for f in text_string_to_metric_families(pages[0]) for s in f.samples}
    assert served["jaxrl_step"] >= 2 and 0 <= served["jaxrl_reward_mean"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("resume=must", 2, "configuration error"),
        ("rewards.terms.0.name=PLACE/rewards.py:broken", 3, "my own mistake"),
    ],
)
def test_a_run_that_cannot_work_ends_at_once(word, code, message, start, tmp_path):
    jobset, node = start("--via", "jobset", "name=tiny", word.replace("PLACE", str(tmp_path)))
    codes = []
    assert simulate(jobset, lambda restarts: codes.append(node.run(restarts)) or codes[-1]) == ("Failed", 0)
    assert codes == [code], node.output
    assert message in node.output


PROGRAM = """
import os, pathlib, signal, sys, time
folder, code = pathlib.Path(sys.argv[1]), None
before = len(list(folder.glob("*.life")))
mine = folder / f"{time.time_ns()}-{os.getpid()}.life"
signal.signal(signal.SIGTERM, lambda *_: (mine.with_suffix(".term").touch(), sys.exit(75)))
mine.write_text(repr(sys.argv[2:]))
while len(lives := sorted(folder.glob("*.life"))) % 2:
    time.sleep(0.05)
if mine == lives[-2]:  # one of the two processes ends by itself
    code = (folder / "codes").read_text().split()[before // 2]
    if code != "-":
        sys.exit(int(code))
time.sleep(300)
"""


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"TPU": 8}})
print("address", cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.fixture
def ray_address():
    """A Ray cluster of its own, with 8 chips, outside this process (jax has threads, and Ray forks)."""
    pytest.importorskip("ray")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", CLUSTER], **pipes)
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
    finally:
        process.communicate("\n", timeout=120)


@pytest.mark.slow
def test_ray_follows_the_same_rules(tmp_path, monkeypatch, ray_address):
    """ray_launch.py on a local Ray: one process a TPU host, ended together, restarted by exit code."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    for name, codes, expected, terminated in [("mistake", "75 3", 3, 2), ("stopped", "137 -", 75, 3)]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "codes").write_text(codes)
        plan = {
            "command": [sys.executable, f"{tmp_path}/program.py", str(folder), "two words; $HOME\n'"],
            "processes": 2,
            "chips_per_host": 4,
            "max_restarts": 2,
            "no_restart": list(manifests.NO_RESTART),
            "grace_seconds": 20,
        }
        (folder / "command.json").write_text(json.dumps(plan))
        launch = [sys.executable, FOLDER / "ray_launch.py", folder / "command.json"]
        driver = subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if name == "stopped":
            while len(list(folder.glob("*.life"))) < 4 and driver.poll() is None:
                time.sleep(0.1)
            driver.send_signal(signal.SIGTERM)
        output, _ = driver.communicate(timeout=240)
        assert driver.returncode == expected, output
        lives = list(folder.glob("*.life"))
        assert len(lives) == 4
        assert {path.read_text() for path in lives} == {repr(["two words; $HOME\n'"])}
        # Who did not end by itself was asked to save.
        assert len(list(folder.glob("*.term"))) == terminated


def test_ray_restarts_are_capped(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    import ray_launch

    plan = {"max_restarts": 2, "no_restart": [2, 3]}
    (tmp_path / "command.json").write_text(json.dumps(plan))
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for codes, expected, count in [([75] * 9, 75, 3), ([75, 0], 0, 2), ([-9] * 9, 137, 3), ([2], 2, 1)]:
        left = list(codes)
        monkeypatch.setattr(ray_launch, "attempt", lambda plan, asked, left=left: left.pop(0))
        assert ray_launch.main(str(tmp_path / "command.json")) == expected
        assert len(codes) - len(left) == count
