"""python -m jaxrl.train: the loop.

    python -m jaxrl.train --config configs/quickstart.yaml optim.learning_rate=1e-5

One step of reinforcement learning: prompts -> rollout -> rewards -> advantages -> batch -> statistics ->
update -> refresh. One step of supervised training: rows -> batch -> update. ``run`` reads in that order;
``recipes/collect.py`` and ``recipes/stages.py`` hold what happens between two arrows.

Exit codes: 0 done; 1 the run diverged, a checkpoint could not be written, or another process is gone; 2
configuration, or processes that disagree; 3 user code; 75 interrupted and saved; 76 interrupted without a
new checkpoint. After 75 and 76 the same command continues.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence as Arguments

from jaxrl.config import run_cli
from jaxrl.host import distributed
from jaxrl.host.failures import telling_others
from jaxrl.host.preemption import stop_on_signal
from jaxrl.run.loop import logger, run
from jaxrl.run.settings import parse
from jaxrl.run.verify import verify_resume


def main(argv: Arguments[str]) -> int:
    """The command line."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--verify-resume",
            action="store_true",
            help="train a few steps twice, once interrupted and continued, compare every bit, and end",
        )

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    with telling_others():
        config, given = parse(
            argv,
            prog="python -m jaxrl.train",
            description="Post-train a language model: supervised, or by reinforcement (the GRPO family).",
            add_options=options,
        )
    distributed.start()
    if given.verify_resume:
        return verify_resume(config)
    with stop_on_signal(config.checkpoint.grace_seconds) as stop:
        return run(config, stop)


if __name__ == "__main__":
    sys.exit(run_cli(main))
