"""python -m jaxrl.evaluate: pass@1, pass@k, maj@k and mean reward of a checkpoint or a Hugging Face folder.

    python -m jaxrl.evaluate --run runs/quickstart
    python -m jaxrl.evaluate --run runs/quickstart/checkpoints/40 eval.samples=8 eval.temperature=1.0
    python -m jaxrl.evaluate --config configs/smollm2_135m_arithmetic.yaml model.path=exported/

``--run`` takes the settings of the run, and its newest checkpoint where none is named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.config import ConfigError, given_file, run_cli
from jaxrl.data.pipeline import load_prompts
from jaxrl.host import distributed
from jaxrl.host.failures import failing_together
from jaxrl.recipes.collect import sample_rows
from jaxrl.record.progress import Progress
from jaxrl.run.agreement import agree_on_config
from jaxrl.run.evaluation import config_of_run, evaluate, run_option
from jaxrl.run.settings import parse
from jaxrl.run.setup import set_up
from jaxrl.store import strict_json


def main(argv: Sequence[str]) -> int:
    """The command line."""

    def options(parser: argparse.ArgumentParser) -> None:
        run_option(parser)
        text = "also write the metrics and every completion as JSON"
        parser.add_argument("--output", metavar="FILE", type=given_file, help=text)

    config, given = parse(
        argv,
        prog="python -m jaxrl.evaluate",
        description="pass@1, pass@k, maj@k and mean reward of a checkpoint or a Hugging Face folder.",
        add_options=options,
        find_config=config_of_run,
        implied=["eval.at_end=true"],  # so that no eval key counts as one without effect
    )
    if not config.eval.enabled:
        raise ConfigError("false, but an evaluation is asked for; leave it out", "eval.at_end")
    if given.run:
        config = dataclasses.replace(config, init_from=given.run)
    if not config.rewards.terms:
        raise ConfigError("no reward is given; evaluation needs at least one", "rewards.terms")
    distributed.start()
    with contextlib.ExitStack() as stack, failing_together():
        agree_on_config(config)
        parts = set_up(config)
        config = parts.config
        prompts = load_prompts(config.eval_data, parts.tokenizer, section="eval")
        params = parts.refresh()(parts.initial_params())
        scorer = parts.scorer(stack)
        sampler = parts.sampler(parts.engine(), stack)
        sampler.swap(params, 0)
        progress = stack.enter_context(Progress(1, config.metrics.progress))
        found, completions, scores = evaluate(parts, sampler, prompts, scorer, progress=progress)
    if distributed.is_first():
        for name, value in found.items():
            print(f"{name:28} {value:.4f}")
        if given.output:
            rows = sample_rows(completions, scores)
            output = Path(given.output)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(strict_json.dumps({"metrics": found, "samples": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
