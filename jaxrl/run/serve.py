"""A model behind JetStream's gRPC protocol, until the process is asked to end."""

from __future__ import annotations

import argparse
import signal
import socket
import threading

import jax.numpy as jnp

from jaxrl.config import ConfigError
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.host import distributed
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.models import Model, hf
from jaxrl.rollout.config import Sampling, check_context
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.weights import make_refresh


def serve(given: argparse.Namespace) -> None:
    """Load the model and serve it until SIGTERM or SIGINT. ``given`` has the options of the command.

    Raises:
        ConfigError: the extra is missing, or no such model.
    """
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


def check_address(host: str, port: int) -> None:
    """See that a server can listen there, before a model is loaded for it.

    Raises:
        ConfigError: no such address, or the port is taken.
    """
    if not 1 <= port < 2**16:
        raise ConfigError(f"{port}: needs a port from 1 to 65535", "--port")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{host!r} is not an address of this machine ({error})", "--host") from error
    with socket.socket(family, kind) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(address)
            s.listen()
        except OSError as error:
            message = f"{port}: cannot listen there, on {host} ({error}); needs a free port"
            raise ConfigError(message, "--port") from error
