"""The pool against functions that hang, crash and return nonsense, by force."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.rewards import RewardPool, RewardsConfig, RewardTerm

USER = str(Path(__file__).parent / "user_functions.py")


def term(name, **kwargs):
    return RewardTerm(name=name.replace("user:", f"{USER}:"), **kwargs)


def config(*terms, **kwargs):
    return RewardsConfig(terms=list(terms), **kwargs)


def score(pool, completions, columns=None, **kwargs):
    size = len(completions)
    return pool.score(["p"] * size, completions, [[1, 2]] * size, columns or {}, **kwargs)


def gone(pid):
    """Whether a process has ended within 40 seconds: a zombie has, once its other threads have too."""
    for _ in range(800):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            threads = os.listdir(f"/proc/{pid}/task")
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z" and len(threads) == 1:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def rough():
    """A pool of 2 whose function does what a completion says, one sample a call, with a limit of 2.5 s."""
    bad = term("user:misbehave", label="bad", per_sample=True)
    with RewardPool(config(bad, workers=2, timeout_seconds=2.5)) as pool:
        yield pool


def test_bad_samples_cost_one_sample_each(rough):
    completions = [
        "fine", "hang", "fine", "raise", "exit", "fine", "segfault", "nan", "none",
        "text", "wrong count", "no list", "bool", "infinite", "system exit", "a dict", "fine",
        "a set", "a frozenset", "keys", "a generator",
    ]  # fmt: skip
    scores = score(rough, completions)
    judged = {"fine": 4.0, "bool": 1.0}
    np.testing.assert_array_equal(scores.rewards, [judged.get(c, np.nan) for c in completions])
    np.testing.assert_array_equal(scores.parts["bad"], scores.rewards)
    assert scores.errors == {
        "bad/timeout": 1,
        "bad/exception": 2,
        "bad/crash": 2,
        "bad/nan": 2,
        "bad/type": 7,
        "bad/count": 1,
    }


def test_a_hang_that_holds_the_interpreter_lock_is_killed(rough):
    scores = score(rough, ["fine", "hang holding the interpreter lock", "fine"])
    np.testing.assert_array_equal(scores.rewards, [4.0, np.nan, 4.0])
    assert scores.errors == {"bad/timeout": 1}


def test_the_pool_keeps_its_size_and_replaces_what_it_kills(rough):
    before = rough.pids
    score(rough, ["hang", "exit", "hang", "exit"])
    after = rough.pids
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)
    assert all(gone(pid) for pid in before)
    np.testing.assert_array_equal(score(rough, ["fine"] * 9).rewards, [4.0] * 9)


def test_a_worker_killed_while_idle_costs_nothing(rough):
    score(rough, ["fine"] * 4)
    victim = rough.pids[0]
    os.kill(victim, signal.SIGKILL)
    assert gone(victim)
    scores = score(rough, ["fine"] * 8)
    np.testing.assert_array_equal(scores.rewards, [4.0] * 8)
    assert scores.errors == {}


def test_calls_from_threads_take_turns(rough):
    found = {}

    def call(length):
        found[length] = score(rough, ["x" * length] * 5 + ["raise"])

    threads = [threading.Thread(target=call, args=(n,)) for n in range(11, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, scores in found.items():
        np.testing.assert_array_equal(scores.rewards, [length] * 5 + [np.nan])
        assert scores.errors == {"bad/exception": 1}
    assert len(found) == 6


def test_each_kind_of_failure_is_logged_once_with_the_traceback(caplog):
    bad = term("user:misbehave", per_sample=True)
    with RewardPool(config(bad, workers=0)) as pool, caplog.at_level(logging.WARNING, "jaxrl"):
        for _ in range(3):
            score(pool, ["raise", "nan", "raise"])
    assert [("exception" in r.getMessage(), "nan" in r.getMessage()) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]
    assert (
        "this text is in the log" in caplog.text and "Traceback" in caplog.text and "misbehave" in caplog.text
    )


def test_on_error_zero_and_stop():
    bad = term("user:misbehave", label="bad", per_sample=True)
    with RewardPool(config(bad, workers=0, on_error="zero")) as pool:
        scores = score(pool, ["nan", "raise", "none", "fine"])
        np.testing.assert_array_equal(scores.rewards, [0.0, 0.0, np.nan, 4.0])  # None is no error
    with RewardPool(config(bad, workers=0, on_error="stop")) as pool:
        np.testing.assert_array_equal(score(pool, ["none", "fine"]).rewards, [np.nan, 4.0])
        with pytest.raises(UserCodeError, match=r"(?s)reward 'bad' .*this text is in the log"):
            score(pool, ["fine", "raise"])
        with pytest.raises(UserCodeError, match="not finite"):
            score(pool, ["nan"])


def test_a_pool_that_stopped_works_on():
    bad = term("user:misbehave", label="bad", per_sample=True)
    with RewardPool(config(bad, workers=2, on_error="stop", timeout_seconds=20)) as pool:
        for _ in range(2):
            with pytest.raises(UserCodeError, match="exception"):
                score(pool, ["fine", "raise", "fine", "fine"] * 4)
        np.testing.assert_array_equal(score(pool, ["fine"] * 3).rewards, [4.0] * 3)


def test_a_batch_call_that_fails_is_repeated_sample_by_sample():
    whole = term("user:whole_batch", label="whole")
    with RewardPool(config(whole, workers=2, timeout_seconds=2.5)) as pool:
        np.testing.assert_array_equal(
            score(pool, ["a", "b", "c"]).rewards, [3.0] * 3
        )  # it saw the whole batch
        scores = score(pool, ["a", "raise", "b", "c"])
        np.testing.assert_array_equal(scores.rewards, [1.0, np.nan, 1.0, 1.0])
        assert scores.errors == {"whole/batch_exception": 1, "whole/exception": 1}
        scores = score(pool, ["a", "hang", "b"])
        np.testing.assert_array_equal(scores.rewards, [1.0, np.nan, 1.0])
        assert scores.errors == {"whole/batch_timeout": 1, "whole/timeout": 1}


def test_a_function_that_never_works_is_given_up():
    broken = term("user:whole_batch", args={"mode": "always raise"}, label="broken")
    with RewardPool(config(broken, term("exact_match"), task_term="exact_match", workers=0)) as pool:
        scores = score(pool, ["a"] * 100, {"answer": ["a"] * 100})
    assert np.isnan(scores.parts["broken"]).all()
    np.testing.assert_array_equal(scores.rewards, [1.0] * 100)
    assert scores.errors == {"broken/batch_exception": 1, "broken/exception": 100}


def test_values_without_an_order_are_refused(caplog):
    """Also where their number is right by chance: which value is whose cannot be known."""
    with (
        RewardPool(config(term("user:as_a_set"), workers=0)) as pool,
        caplog.at_level(logging.WARNING, "jaxrl"),
    ):
        scores = score(pool, ["a", "bb", "ccc"])
    assert np.isnan(scores.rewards).all()
    assert scores.errors == {"as_a_set/batch_type": 1, "as_a_set/type": 3}
    assert "has no order; expected a list" in caplog.text
    with RewardPool(config(term("user:as_a_set"), workers=0, on_error="stop")) as pool:
        with pytest.raises(UserCodeError, match=r"as_a_set.*no order"):
            score(pool, ["a", "bb"])


def test_references_that_say_nothing_are_told_once(caplog):
    with (
        RewardPool(config(term("math_answer"), workers=0)) as pool,
        caplog.at_level(logging.WARNING, "jaxrl"),
    ):
        for _ in range(2):
            scores = score(pool, ["#### 5"] * 4, {"answer": ["5", None, "", float("nan")]})
    np.testing.assert_array_equal(scores.rewards, [1.0, np.nan, np.nan, np.nan])
    assert scores.errors == {}
    assert [r.getMessage().partition(" samples")[0] for r in caplog.records] == [
        "reward 'math_answer' abstained on 3 of 4"
    ]


def test_weighted_sum_over_the_terms_that_did_not_abstain():
    columns = {"level": [1.0, 2.0, 3.0], "answer": ["a", None, "x"]}
    terms = [
        term("exact_match", weight=2.0),
        term("user:with_named_column", args={"which": "level"}, weight=-0.5, label="level"),
        term("user:misbehave", per_sample=True, label="bad"),
    ]
    with RewardPool(config(*terms, workers=0)) as pool:
        scores = score(pool, ["a", "none", "none"], columns)
    np.testing.assert_array_equal(scores.parts["exact_match"], [1.0, np.nan, 0.0])
    np.testing.assert_array_equal(scores.parts["level"], [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(scores.parts["bad"], [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(scores.rewards, [2.0 - 0.5 + 1.0, -1.0, -1.5])
    assert list(scores.parts) == ["exact_match", "level", "bad"]
    assert scores.answers == ["a", "none", "none"]
    assert scores.errors == {}


def test_all_abstaining_gives_nan():
    with RewardPool(config(term("exact_match"), workers=0)) as pool:
        assert np.isnan(score(pool, ["a", "b"], {"answer": [None, None]}).rewards).all()


def test_functions_get_what_their_signature_names():
    columns = {"level": [10, 20], "name": ["x", "y"]}
    terms = [
        term("user:with_columns"),
        term("user:with_columns", args={"difficulty": 2}, label="harder"),
        term("user:with_everything"),
        term("user:with_named_column", args={"which": "level"}),
    ]
    with RewardPool(config(*terms, workers=0)) as pool:
        scores = pool.score(["p", "pp"], ["c", "c"], [np.array([1, 2], np.int32), []], columns)
    np.testing.assert_array_equal(scores.parts["with_columns"], [14.0, 23.0])
    np.testing.assert_array_equal(scores.parts["harder"], [24.0, 43.0])
    np.testing.assert_array_equal(scores.parts["with_everything"], [10.0, 20.0])
    np.testing.assert_array_equal(scores.parts["with_named_column"], [10.0, 20.0])
    assert scores.errors == {}


def test_a_column_named_like_a_setting_of_a_built_in_is_left_alone():
    """The built-in arithmetic data has a column ``gold``, and the reward an argument of that name."""
    with RewardPool(config(term("arithmetic"), workers=0)) as pool:
        scores = score(pool, ["3", "5"], {"answer": ["3", "4"], "gold": ["3", "5"]})
    assert scores.rewards.tolist() == [1.0, 0.0]


def test_a_missing_column_is_an_error_of_the_configuration():
    with RewardPool(config(term("user:needs_unknown_column"), workers=0)) as pool:
        with pytest.raises(ConfigError, match=r"nowhere.*level"):
            score(pool, ["a"], {"level": [1]})
    with RewardPool(config(term("math_answer", args={"gold": "solution"}), workers=1)) as pool:
        with pytest.raises(ConfigError, match=r"solution.*answer"):
            score(pool, ["a"], {"answer": ["1"]})


def test_given_parts_of_a_reward_model_join_the_sum():
    terms = [term("exact_match"), term("reward_model", weight=0.5, args={"path": "somewhere"})]
    with RewardPool(config(*terms, workers=0)) as pool:
        given = {"reward_model": np.array([1.0, -2.0, np.nan, np.inf])}
        scores = score(pool, ["a", "b", "a", "b"], {"answer": ["a"] * 4}, given=given)
        np.testing.assert_array_equal(scores.rewards, [1.5, -1.0, 1.0, 0.0])
        np.testing.assert_array_equal(scores.parts["reward_model"], [1.0, -2.0, np.nan, np.nan])
        assert scores.errors == {"reward_model/nan": 1}
        with pytest.raises(ValueError, match="reward_model"):
            score(pool, ["a"], {"answer": ["a"]})
        with pytest.raises(ValueError, match="shape"):
            score(pool, ["a"], {"answer": ["a"]}, given={"reward_model": np.zeros(2)})
    only_model = config(term("reward_model", args={"path": "somewhere"}), workers=3)
    with RewardPool(only_model) as pool:
        assert pool.pids == []  # nothing to run
        np.testing.assert_array_equal(score(pool, ["a"], given={"reward_model": np.ones(1)}).rewards, [1.0])


def test_answers_come_from_the_task_term_and_never_cost_the_reward():
    terms = [term("length", args={"target": 2}), term("user:counter", label="task")]
    with RewardPool(config(*terms, task_term="task", workers=0)) as pool:
        scores = score(pool, ["abc", "unreadable"])
    assert scores.answers == ["ABC", None]
    np.testing.assert_array_equal(scores.rewards, [4.0, 11.0])
    assert scores.errors == {}


def test_processes_and_in_process_agree_on_tricky_text():
    line = "7" * 1_000_000
    texts = [
        "\ud800 lone surrogate",
        "nul \x00 byte",
        "",
        line,
        "\u202e\ufffd\U0001f600",
        "\r\n\u2028 end",
        "#### 5\x00",
    ]
    columns = {"answer": [*texts[:-1], "5"], "numbers": [np.float32(1.5)] * len(texts)}
    terms = [term("exact_match"), term("math_answer"), term("user:counter", label="count"), term("format")]
    found = []
    for workers in (0, 2):
        with RewardPool(config(*terms, workers=workers, timeout_seconds=60)) as pool:
            found.append(score(pool, texts, columns))
    here, there = found
    np.testing.assert_array_equal(here.rewards, there.rewards)
    for name in here.parts:
        np.testing.assert_array_equal(here.parts[name], there.parts[name])
    assert here.answers == there.answers
    assert here.errors == there.errors == {}
    np.testing.assert_array_equal(there.parts["exact_match"], [1.0, 1.0, np.nan, 1.0, 1.0, 1.0, 0.0])
    np.testing.assert_array_equal(there.parts["count"], [len(t) for t in texts])


def test_workers_are_fresh_interpreters_without_jax():
    import jax

    jax.numpy.zeros(1).block_until_ready()  # the parent runs jax, with its threads
    with RewardPool(config(term("user:where"), term("math_answer", label="math"), workers=1)) as pool:
        scores = score(pool, ["#### 1"], {"answer": ["1"]})
    np.testing.assert_array_equal(scores.parts["where"], [1.0])
    np.testing.assert_array_equal(scores.parts["math"], [1.0])


def test_columns_that_cannot_be_sent_are_named_as_such():
    with RewardPool(config(term("user:counter"), workers=1)) as pool:
        with pytest.raises(ConfigError, match="workers: 0"):
            score(pool, ["a"], {"open_file": [threading.Lock()]})
        np.testing.assert_array_equal(score(pool, ["a"]).rewards, [1.0])


def test_nothing_survives_close(tmp_path):
    file = tmp_path / "pids"
    starter = term("user:start_a_child_and_hang", args={"file": str(file)}, per_sample=True)
    pool = RewardPool(config(starter, workers=1, timeout_seconds=30))
    score(pool, ["only start it"])
    pids = [*map(int, file.read_text().split()), *pool.pids]
    pool.close()
    assert all(gone(pid) for pid in pids)
    pool.close()  # once more does nothing
    with pytest.raises(RuntimeError, match="closed"):
        score(pool, ["a"])


def test_a_kill_takes_the_children_of_a_worker_along(tmp_path):
    file = tmp_path / "pids"
    starter = term("user:start_a_child_and_hang", args={"file": str(file)}, per_sample=True, label="child")
    with RewardPool(config(starter, workers=1, timeout_seconds=2.5)) as pool:
        assert score(pool, ["a"]).errors == {"child/timeout": 1}
        assert all(gone(pid) for pid in map(int, file.read_text().split()))


@pytest.mark.parametrize("completion", ["hang", "hang holding the interpreter lock", "fine"])
def test_nothing_survives_a_killed_parent(completion):
    program = f"""
import sys, threading
from jaxrl.rewards import RewardPool, RewardTerm, RewardsConfig
term = RewardTerm(name={USER + ":misbehave"!r}, per_sample=True)
pool = RewardPool(RewardsConfig(terms=[term], workers=2, timeout_seconds=3.0))
pool.score(["p"] * 4, ["fine"] * 4, [[1]] * 4, {{}})
print(*pool.pids, flush=True)
pool.score(["p"] * 2, [{completion!r}] * 2, [[1]] * 2, {{}})
threading.Event().wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, parent.stdout.readline().split()))
    time.sleep(0.3)  # it is inside the call, or past it
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from jaxrl.rewards import RewardPool, RewardTerm, RewardsConfig\n"
        "print('started')\n"
        "pool = RewardPool(RewardsConfig(terms=[RewardTerm(name='exact_match')], workers=2))\n"
        "print(pool.score(['p'], ['a'], [[1]], {'answer': ['a']}).rewards)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "started\n[1.]\n", done.stderr
    assert done.stderr == ""


def test_a_module_that_cannot_be_imported_by_a_worker_ends_the_run(tmp_path):
    file = tmp_path / "only_here.py"
    file.write_text(
        "import os\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    raise RuntimeError('no licence in this process')\n"
        "def reward(completions):\n"
        "    return [1.0] * len(completions)\n"
    )
    with RewardPool(config(RewardTerm(name=f"{file}:reward"), workers=1)) as pool:
        with pytest.raises(UserCodeError, match="no licence in this process"):
            score(pool, ["a"])
    file = tmp_path / "dies_there.py"
    file.write_text(file.with_name("only_here.py").read_text().replace("raise RuntimeError", "os._exit(7) #"))
    with RewardPool(config(RewardTerm(name=f"{file}:reward"), workers=2)) as pool:
        with pytest.raises(UserCodeError, match="exit code 7"):
            score(pool, ["a"])


def test_lists_of_different_lengths_are_refused():
    with RewardPool(config(term("exact_match"), workers=0)) as pool:
        with pytest.raises(ValueError, match="answer"):
            score(pool, ["a", "b"], {"answer": ["a"]})


def test_an_empty_batch_gives_empty_arrays():
    with RewardPool(config(term("exact_match"), workers=0)) as pool:
        scores = score(pool, [], {"answer": []})
    assert scores.rewards.shape == (0,) and scores.parts["exact_match"].shape == (0,) and scores.answers == []
