"""python -m jaxrl.serve: a model behind JetStream's gRPC protocol, sampled by the engine that training uses.

    python -m jaxrl.serve --protocol jetstream --model models/SmolLM2-135M-Instruct --port 9000

Needs the extra ``jetstream``. JetStream's protocol carries a prompt (text or ids) and a token limit; how to
sample is the server's choice.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence

import jax.numpy as jnp

from jaxrl.config import ConfigError, run_cli
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.host import distributed
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.transfer import make_refresh
from jaxrl.models import Model, hf
from jaxrl.rollout.config import Sampling, check_context
from jaxrl.rollout.engine import Engine
from jaxrl.run.serve import _arguments


def main(argv: Sequence[str]) -> int:
    """The command line."""
    given = _arguments(argv)
    try:
        from jaxrl.rollout.jetstream import JetStreamEngine, start_server
    except ImportError as error:
        raise ConfigError(
            f"--protocol jetstream needs google-jetstream: pip install 'jaxrl[jetstream]' ({error})"
        ) from error
    distributed.start()
    folder = hf.resolve(given.model, "--model")
    tokenizer = load_tokenizer(str(folder), "--model")
    template = "auto" if tokenizer.has_chat_template else "none"
    mesh = make_mesh(MeshConfig(tensor=given.tensor))
    model_config = hf.load_config(folder)
    limits = given.max_prompt_tokens, given.max_new_tokens
    check_context(model_config.max_positions, *limits, "--max-prompt-tokens")
    model = Model(model_config, compute_dtype=given.dtype, mesh=mesh if mesh.size > 1 else None)
    refresh = make_refresh(model, mesh, jnp.dtype(given.dtype))
    params = refresh(hf.load_params(folder, model, mesh, given.dtype))
    sampling = Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        max_new_tokens=given.max_new_tokens,
    )
    engine = Engine(
        model,
        mesh,
        slots=given.slots,
        prefill_rows=1,
        max_prompt_tokens=given.max_prompt_tokens,
        max_new_tokens=given.max_new_tokens,
        steps_per_dispatch=1,
        stop_ids=Renderer(DataConfig(chat_template=template), tokenizer).stop_ids,
        vocab_limit=min(tokenizer.vocab_size, model.config.vocab_size),
        cache_dtype=jnp.dtype(given.dtype),
    )
    engine.warm_up(params)
    served = JetStreamEngine(engine, params, tokenizer, sampling, given.seed)
    server = start_server(served, given.port, given.host)
    print(f"serving {given.model} on {given.host}, port {given.port}: {engine.slots} slots", flush=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
