"""The driver of a RayJob: one training process on every TPU host, restarted by the rules of a JobSet.

    python ray_launch.py command.json

``command.json``: ``command`` (argument vector), ``processes``, ``chips_per_host`` (the ``TPU`` that a Ray
node has), ``max_restarts``, ``no_restart`` (exit codes), ``grace_seconds`` (from SIGTERM to SIGKILL). It goes
to the cluster in a ConfigMap, so no shell reads it. Runs where the image has Ray; imports nothing of jaxrl.

When a process ends with a code other than 0, the others are ended too, and all start anew.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

import ray

LOST = 1
"""Stands for the exit code of a process whose host is gone."""


class Host:
    """A training process on the host where this actor lives."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.stopped = False

    def run(self, command: list[str]) -> int:
        """Run ``command`` to its end; its exit code, -n after signal n."""
        # Ray gives its workers one thread for numerical libraries; a host has this process alone.
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(command, stderr=subprocess.STDOUT, env=environ)
        if self.stopped:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL ``grace_seconds`` later."""
        self.stopped = True
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()


def attempt(plan: dict[str, Any], asked: threading.Event) -> int:
    """All processes once. The code of the first that failed, or 0."""
    actor = cast(Any, ray.remote(Host))
    needs = {"TPU": plan["chips_per_host"]}
    options = {"num_cpus": 0, "resources": needs, "max_concurrency": 2}  # stop() beside run()
    hosts = [actor.options(**options).remote() for _ in range(plan["processes"])]
    running = {host.run.remote(plan["command"]): host for host in hosts}
    worst, stopping = 0, False
    while running:
        ended, _ = ray.wait(list(running), timeout=0.5)
        for result in ended:
            del running[result]
            try:
                code = ray.get(result)
            except ray.exceptions.RayError as error:
                print(f"ray_launch: a host is lost: {error}", file=sys.stderr, flush=True)
                code = LOST
            worst = worst or code
        if (worst or asked.is_set()) and not stopping:
            stopping = True
            for host in running.values():
                host.stop.remote(plan["grace_seconds"])
    for host in hosts:
        ray.kill(host)
    return worst


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    asked = threading.Event()
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which sets its own
        signal.signal(number, lambda *_: asked.set())
    for restarts in range(plan["max_restarts"] + 1):
        started = time.monotonic()
        code = attempt(plan, asked)
        seconds = time.monotonic() - started
        print(f"ray_launch: ended with {code} after {seconds:.0f} s", file=sys.stderr, flush=True)
        if code == 0 or code in plan["no_restart"] or asked.is_set():
            break
        if restarts < plan["max_restarts"]:
            print(
                f"ray_launch: restart {restarts + 1} of {plan['max_restarts']}", file=sys.stderr, flush=True
            )
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
