"""python -m jaxrl.smoke: a run's own configuration, small, on this machine's CPU, before you reserve a slice.

    scripts/smoke.sh configs/my_run.yaml algo.kl_coef=0.01

Configuration, model and mesh, data, chat template and rewards are those of the run, checked in full. Then the
model is shrunk (see ``shrink.py``), the mesh keeps its axes, on virtual CPU devices, and the real command
trains, is killed, continues and evaluates, in a temporary folder. Exit code: 0, or that of what failed.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl.config import run_cli, word_or_config
from jaxrl.run.settings import parse
from jaxrl.run.smoke import StageError, Stages, check, limits, rehearse


def main(argv: Sequence[str]) -> int:
    """The command line."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--keep", action="store_true", help="keep the temporary folder")

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    jax.config.update("jax_platforms", "cpu")
    stages = Stages()
    begin = time.monotonic()
    with stages.stage("configuration") as found:
        config, given = parse(
            argv,
            prog="python -m jaxrl.smoke",
            description="Check a run's configuration, data and rewards, and rehearse it small on the CPU.",
            add_options=options,
            find_config=word_or_config,
        )
        found.append(f"{config.name}: every key known, no problem")
    folder, code = Path(tempfile.mkdtemp(prefix=f"jaxrl-smoke-{config.name}-")), 1
    try:
        rehearse(check(config, folder, stages), folder, stages)
        code = 0
    except StageError as error:
        print(f"the small run failed:\n{error}", file=sys.stderr)
        code = error.code
    finally:
        stages.print()
        if given.keep or (code and any(folder.iterdir())):
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if code == 0:
        print(f"passed in {time.monotonic() - begin:.0f} s. Not shown by this:")
        for line in limits(config):
            print(f"  - {line}")
    return code


if __name__ == "__main__":
    sys.exit(run_cli(main))
