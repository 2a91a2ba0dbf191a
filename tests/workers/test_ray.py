"""The pools on a real Ray cluster: the same results as local processes, whatever is killed."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from jaxrl.config import UserCodeError
from jaxrl.environments import EnvironmentConfig
from jaxrl.environments.calls import Call
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.rewards import RewardPool, RewardsConfig, RewardTerm
from jaxrl.workers.config import PoolConfig

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

TESTS = pathlib.Path(__file__).parents[1]
USER = str(TESTS / "rewards" / "user_functions.py")
ROUGH = str(TESTS / "environments" / "user_environments.py") + ":Rough"
RAY = str(pathlib.Path(sys.executable).with_name("ray"))


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids, seconds=40):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(alive, pids))


def descendants(pid):
    found = [
        int(p) for f in pathlib.Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()
    ]
    return [*found, *(p for child in found for p in descendants(child))]


@pytest.fixture(scope="module")
def cluster():
    """(address, address of its dashboard) of a cluster on this machine, as one starts it by hand."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: it holds sockets
    port, dashboard, agent = free_ports(3)
    patch = pytest.MonkeyPatch()
    for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        patch.setenv(name, value)
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=80000000"]
    command += [f"--temp-dir={folder}", "--node-ip-address=127.0.0.1", f"--port={port}"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    with open(f"{folder}/log", "w") as log:
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and head.poll() is None:
            if "--block" in (text := pathlib.Path(f"{folder}/log").read_text()):
                break
            time.sleep(0.2)
        assert head.poll() is None, text
        yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
    finally:
        ray.shutdown()
        started = descendants(head.pid)
        head.terminate()
        head.wait(120)
        left = not gone(started, 30)
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left


@pytest.fixture
def pool(cluster):
    return PoolConfig(kind="ray", address=cluster[0], num_cpus=0.5)


def term(name, **kwargs):
    return RewardTerm(name=name.replace("user:", f"{USER}:"), **kwargs)


def score(pool, completions, columns=None):
    size = len(completions)
    return pool.score(["p"] * size, completions, [[1, 2]] * size, columns or {})


def test_results_equal_those_of_local_processes(pool):
    """Whole batches and single samples, answers, failures of every kind; a hang costs its time limit."""
    texts = ["#### 1", "\ud800 lone", "", "hang", "raise", "exit", "nan", "none", "text", "fine"]
    terms = [
        term("math_answer"),
        term("user:counter", label="count"),
        term("user:misbehave", label="bad", per_sample=True),
    ]
    found = []
    before = signal.getsignal(signal.SIGTERM)
    for where in (PoolConfig(), pool):
        config = RewardsConfig(terms=terms, workers=2, timeout_seconds=2.5, task_term="count", pool=where)
        with RewardPool(config) as rewards:
            found.append(score(rewards, texts, {"answer": ["1"] * len(texts)}))
    here, there = found
    for name in here.parts:
        np.testing.assert_array_equal(here.parts[name], there.parts[name])
    np.testing.assert_array_equal(here.rewards, there.rewards)
    assert here.answers == there.answers and here.errors == there.errors
    assert there.errors["bad/timeout"] == 1 and there.errors["bad/crash"] == 1
    assert signal.getsignal(signal.SIGTERM) is before  # a run saves at SIGTERM; Ray would end it


def test_an_actor_that_is_killed_costs_a_retry(pool, tmp_path, caplog):
    lose = term("user:lose_the_supervisor", args={"file": str(tmp_path / "pid")}, per_sample=True)
    with RewardPool(RewardsConfig(terms=[lose], workers=2, timeout_seconds=60, pool=pool)) as rewards:
        scores = score(rewards, ["a", "lose", "bb", "ccc"])
        np.testing.assert_array_equal(scores.rewards, [1.0, 4.0, 2.0, 3.0])
        assert scores.errors == {} and "tried again" in caplog.text
    assert gone([int((tmp_path / "pid").read_text())])


def test_nothing_survives_a_close_or_a_kill(pool, tmp_path):
    file = tmp_path / "pids"
    starter = term("user:start_a_child_and_hang", args={"file": str(file)}, per_sample=True, label="child")
    config = RewardsConfig(terms=[starter], workers=1, timeout_seconds=3, pool=pool)
    with RewardPool(config) as rewards:
        assert score(rewards, ["a"]).errors == {"child/timeout": 1}
        assert gone(map(int, file.read_text().split()))
        score(rewards, ["only start it"])
    assert gone(map(int, file.read_text().split()))
    with pytest.raises(RuntimeError, match="closed"):
        score(rewards, ["a"])


def test_nothing_survives_a_killed_training_process(pool, tmp_path):
    (tmp_path / "mine").mkdir()
    shutil.copy(USER, tmp_path / "mine" / "mine.py")
    program = f"""
from jaxrl.workers.config import PoolConfig
from jaxrl.rewards import RewardPool, RewardTerm, RewardsConfig
args = {{"file": {str(tmp_path / "pids")!r}}}
term = RewardTerm(name="mine.py:start_a_child_and_hang", args=args, per_sample=True)
sent = {{"working_dir": "."}}
where = PoolConfig(kind="ray", address={pool.address!r}, num_cpus=0.5, runtime_env=sent)
pool = RewardPool(RewardsConfig(terms=[term], workers=1, timeout_seconds=600, pool=where))
pool.score(["p"], ["a"], [[1]], {{}})
"""
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, env=env, cwd=tmp_path / "mine", stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (pids := (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split()):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert len(pids) == 2 and gone(map(int, pids), 90)


def test_more_workers_than_the_cluster_has_room_for(pool, caplog):
    large = PoolConfig(kind="ray", address=pool.address, num_cpus=1.5)
    config = RewardsConfig(terms=[term("user:counter")], workers=2, timeout_seconds=60, pool=large)
    with RewardPool(config) as rewards:
        np.testing.assert_array_equal(score(rewards, ["a", "bb", "ccc"]).rewards, [1.0, 2.0, 3.0])
    assert "CPU 3 of 2" in caplog.text


def test_a_module_that_the_cluster_cannot_import_ends_the_run(pool, tmp_path):
    file = tmp_path / "only_here.py"
    file.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise RuntimeError('no licence there')\n"
        "def reward(completions):\n    return [1.0] * len(completions)\n"
    )
    config = RewardsConfig(terms=[RewardTerm(name=f"{file}:reward")], workers=1, pool=pool)
    with RewardPool(config) as rewards, pytest.raises(UserCodeError, match="no licence there"):
        score(rewards, ["a"])


def test_episodes_equal_those_of_local_processes(pool):
    found = []
    for where in (PoolConfig(), pool):
        config = EnvironmentConfig(name=ROUGH, workers=2, timeout_seconds=3, pool=where)
        environment = EnvironmentPool(config)
        outcomes = {}
        for number, name in enumerate(("fine", "hang", "exit", "raise", "number")):
            turn = [{"role": "assistant", "content": "12345"}]
            environment.submit(Call(episode=number, messages=turn, state={"asked": 1, "name": name}))
        while len(outcomes) < 5:
            outcomes |= dict(environment.poll(block=True))
        environment.close()
        found.append(
            [(o.messages, o.reward, o.state, o.failure and o.failure[0]) for _, o in sorted(outcomes.items())]
        )
    assert found[0] == found[1]
    assert [failure for *_, failure in found[1]] == [None, "timeout", "crash", "exception", "type"]


def test_without_a_cluster_the_setting_is_named():
    (port,) = free_ports(1)
    program = f"""
from jaxrl.workers.config import PoolConfig
from jaxrl.workers.ray import connect
connect(PoolConfig(kind="ray", address="127.0.0.1:{port}"), "rewards.pool")
"""
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100
    )
    assert "ConfigError" in done.stderr and "rewards.pool.address" in done.stderr, done.stderr


def test_a_submitted_job_trains_with_its_own_rewards(cluster, tmp_path):
    """As on GKE: ``ray job submit --working-dir . -- python -m jaxrl.train``, files by relative paths."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "mine.py").write_text(
        "import os\n"
        "def even(token_ids):\n"
        f"    open('{tmp_path}/who', 'a').write(f'{{os.getppid()}} {{os.getcwd()}}\\n')\n"
        "    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in token_ids]\n"
    )
    (tmp_path / "job" / "c.yaml").write_text(f"""
name: job
output_dir: {tmp_path}/runs
steps: 2
model:
  scratch: {{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}}
  tokenizer: builtin:chars
  compute_dtype: float32
data: {{options: {{digits: 1}}, chat_template: none, max_prompt_tokens: 6, prompts_per_step: 2}}
rollout: {{group_size: 2, max_new_tokens: 4, decode_batches: 1}}
rewards: {{terms: [{{name: "mine.py:even"}}], workers: 1, pool: {{kind: ray, num_cpus: 0.5}}}}
batch: {{micro_batch_tokens: 64}}
checkpoint: {{every: 0}}
metrics: {{progress: none, tensorboard: false}}
""")
    submit = [RAY, "job", "submit", "--address", cluster[1], "--working-dir", str(tmp_path / "job"), "--"]
    train = [sys.executable, "-m", "jaxrl.train", "--config", "c.yaml"]
    done = subprocess.run([*submit, *train], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/job/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines if "event" not in m] == [1, 2]
    assert all(m["reward/errors"] == 0 and m["reward/even"] > 0 for m in lines if "event" not in m)
    assert "working_dir_files" in (tmp_path / "who").read_text()  # the copy that Ray made of it
    failing = subprocess.run([*submit, *train, "steps=0"], capture_output=True, text=True, timeout=300)
    assert failing.returncode != 0 and "steps: 0: needs at least 1" in failing.stdout
