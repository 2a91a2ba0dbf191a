"""python -m jaxrl.serve: a model behind JetStream's gRPC protocol, sampled by the engine that training uses.

    python -m jaxrl.serve --protocol jetstream --model models/SmolLM2-135M-Instruct --port 9000

Needs the extra ``jetstream``. JetStream's protocol carries a prompt (text or ids) and a token limit; how to
sample is the server's choice.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from jaxrl.config import ConfigError, Parser, given_path, run_cli
from jaxrl.models.source import DTYPES
from jaxrl.rollout.config import Sampling, sampling_problems
from jaxrl.run.serve import check_address, serve

PROTOCOLS = ("jetstream",)


def main(argv: Sequence[str]) -> int:
    """The command line."""
    serve(_arguments(argv))
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m jaxrl.serve", description="Serve a Hugging Face folder.")
    parser.add_argument("--protocol", choices=PROTOCOLS, required=True)
    text = "Hugging Face folder or hub name"
    parser.add_argument("--model", required=True, metavar="DIR", type=given_path, help=text)
    text = "address to listen on; 127.0.0.1 (the default): this machine alone; 0.0.0.0 or ::: every interface"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--slots", type=int, default=32, help="requests decoded at once")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="most that a request may ask for")
    parser.add_argument("--temperature", type=_number, default=0.0, help="0: greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0: off")
    parser.add_argument("--top-p", type=_number, default=1.0, help="1: off")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and computation")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share one copy of the model")
    given = parser.parse_args(argv)
    for name in ("slots", "max_prompt_tokens", "max_new_tokens", "tensor"):
        if getattr(given, name) < 1:
            raise ConfigError(f"{getattr(given, name)}: needs at least 1", f"--{name.replace('_', '-')}")
    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    if found := list(sampling_problems(sampling)):
        raise ConfigError([(f"--{name.replace('_', '-')}", message) for name, message in found])
    check_address(given.host, given.port)
    return given


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


if __name__ == "__main__":
    sys.exit(run_cli(main))
