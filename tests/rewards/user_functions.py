"""Reward functions as a user might write them, and as one hopes no user does. Loaded by file path."""

import ctypes
import os
import re
import subprocess
import time


def misbehave(completions):
    """One completion a call: does what the completion says."""
    (what,) = completions
    if what == "hang":
        time.sleep(10_000)
    if what == "hang holding the interpreter lock":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "raise":
        raise ValueError("this text is in the log")
    if what == "exit":
        os._exit(3)
    if what == "system exit":
        raise SystemExit(4)
    if what == "segfault":
        ctypes.string_at(0)
    special = {
        "none": [None],
        "nan": [float("nan")],
        "infinite": [float("inf")],
        "text": ["1.0"],
        "wrong count": [1.0, 2.0],
        "no list": 1.0,
        "a dict": {0: 1.0},
        "a set": {1.0},
        "a frozenset": frozenset([1.0]),
        "keys": {1.0: 0}.keys(),
        "a generator": (v for v in [1.0]),
        "bool": [True],
    }
    return special.get(what, [float(len(what))])


def whole_batch(completions, mode="good"):
    """For calls with the whole batch; ``bad`` rows break it as long as they are in it."""
    if "hang" in completions:
        time.sleep(10_000)
    if "raise" in completions:
        raise RuntimeError("one row is bad")
    if mode == "always raise":
        raise RuntimeError("never works")
    return [float(len(completions))] * len(completions)


def as_a_set(completions):
    """Loses values that are equal, and the order of the others."""
    return {float(len(c)) for c in completions}


def mean(completions):
    return [3.0] * len(completions)


def with_columns(prompts, completions, token_ids, level, difficulty=1.0):
    rows = zip(prompts, completions, token_ids, level, strict=True)
    return [len(p) + len(c) + len(t) + v * difficulty for p, c, t, v in rows]


def with_everything(completions, **rest):
    assert set(rest) == {"prompts", "token_ids", "level", "name"}, sorted(rest)
    return [float(v) for v in rest["level"]]


def with_named_column(columns, *, which):
    return [float(v) for v in columns[which]]


def needs_unknown_column(completions, nowhere):
    return [0.0] * len(completions)


def where(completions):
    """What the process looks like: 1 when it has neither jax nor what the test's main module imports."""
    import sys

    clean = "jax" not in sys.modules and "pytest" not in sys.modules
    return [float(clean)] * len(completions)


def start_a_child_and_hang(completions, file):
    child = subprocess.Popen(["sleep", "10000"])
    with open(file, "w") as f:
        f.write(f"{os.getpid()} {child.pid}")
        f.flush()
    if completions[0] != "only start it":
        time.sleep(10_000)
    return [1.0]


class Counter:
    """An object with state, called like a function."""

    def __call__(self, completions):
        return [float(len(c)) for c in completions]

    @staticmethod
    def answer(completion):
        if completion == "unreadable":
            raise ValueError
        return completion.upper()


counter = Counter()


async def asynchronous(completions):
    return [0.0]


def lose_the_supervisor(completions, file):
    """Once, the parent of this process is killed in the middle of a call."""
    if completions[0] == "lose" and not os.path.exists(file):
        with open(file, "w") as f:
            f.write(str(os.getpid()))
        os.kill(os.getppid(), 9)
        time.sleep(10_000)
    return [float(len(c)) for c in completions]
