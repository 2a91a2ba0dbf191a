"""JetStream's own server, client and load tester over our engine, by the real command."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.mesh.axes import make_mesh
from jaxrl.models import Model, ModelConfig, hf
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sampler import Sampler, rollout
from jaxrl.rollout.sampling import EVAL_STREAM
from jaxrl.rollout.weights import make_refresh
from jaxrl.types import Prompts

pytestmark = pytest.mark.slow
NEW = 24
SIZES = dict(
    model_type="llama",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model over bytes and pieces of several bytes: most of its text is odd, as a test wants."""
    folder = tmp_path_factory.mktemp("model")
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    euro = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("€")[0][0]
    vocab = {c: i for i, c in enumerate(["<eos>", *characters, euro[:2], euro])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [(euro[0], euro[1]), (euro[:2], euro[2])]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    tokenizer = load_tokenizer(str(folder))
    model = Model(ModelConfig.from_scratch(SIZES, vocab_size=tokenizer.vocab_size))
    params = jax.tree.map(lambda x: 5 * x if x.ndim > 2 else x, model.init(jax.random.key(1), one_device()))
    hf.save_folder(params, model, folder / "exported", folder)
    return folder / "exported"


def one_device():
    return make_mesh(devices=jax.devices()[:1])


PROMPTS = [f"{i} apples cost {i * i} €, so" for i in range(32)]


@pytest.fixture(scope="module")
def expected(folder):
    """Greedy ids of each prompt, by our own sampler."""
    tokenizer = load_tokenizer(str(folder))
    mesh = one_device()
    model = Model(hf.load_config(folder))
    params = make_refresh(model, mesh, jax.numpy.dtype("float32"))(hf.load_params(folder, model, mesh))
    engine = Engine(
        model,
        mesh,
        slots=8,
        prefill_rows=8,
        max_prompt_tokens=64,
        max_new_tokens=NEW,
        stop_ids=tokenizer.stop_ids,
        vocab_limit=tokenizer.vocab_size,
    )
    tokens = [np.array(tokenizer.encode(p), np.int32) for p in PROMPTS]
    prompts = Prompts(ids=range(32), tokens=tokens, texts=PROMPTS, examples=[{}] * 32)
    sampling = Sampling(temperature=0.0, max_new_tokens=NEW)
    sampler = Sampler(engine, tokenizer)
    sampler.swap(params, 0)
    found = rollout(sampler, prompts, group_size=1, sampling=sampling, stream=EVAL_STREAM)
    return [[int(i) for i in s.tokens if i not in tokenizer.stop_ids] for s in found.samples]


@pytest.fixture(scope="module")
def port(folder, tmp_path_factory):
    """Of a server started by the real command."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--port", port, "--slots", 8, "--max-prompt-tokens", 64, "--max-new-tokens", 64]
    command = [sys.executable, "-m", "jaxrl.serve", "--protocol", "jetstream", "--model", folder, *options]
    environment = {**os.environ, "XLA_FLAGS": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with open(log, "w") as output:
        server = subprocess.Popen(
            [str(part) for part in command], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        for _ in range(3000):
            if "serving" in log.read_text() or server.poll() is not None:
                break
            asyncio.run(asyncio.sleep(0.1))
        assert "serving" in log.read_text(), log.read_text()[-3000:]
        yield port
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()[-3000:]


def request(prompt, limit=NEW):
    from jetstream.core.proto import jetstream_pb2

    return jetstream_pb2.DecodeRequest(
        text_content=jetstream_pb2.DecodeRequest.TextContent(text=prompt), max_tokens=limit
    )


async def ask(port, requests):
    """(text, ids) of each answer; all requests at once, as JetStream's client sends them."""
    import grpc
    from jetstream.core.proto import jetstream_pb2_grpc

    async def one(stub, request):
        text, ids = "", []
        async for part in stub.Decode(request):
            sample = part.stream_content.samples[0]
            text, ids = text + sample.text, [*ids, *sample.token_ids]
        return text, ids

    async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        return await asyncio.gather(*(one(stub, r) for r in requests))


def whole_characters(text):
    """The text up to a last character that is not complete."""
    return text.rstrip("\ufffd")


def test_it_listens_on_this_machine_alone(port):
    """On Linux 127.0.0.2 is this machine as well, and no address of who listens on 127.0.0.1."""
    found = {}
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as s:
            found[address] = s.connect_ex((address, port)) == 0
    assert found == {"127.0.0.1": True, "127.0.0.2": False}


def test_one_request_gets_what_the_engine_samples_the_first_token_included(port, folder, expected):
    tokenizer = load_tokenizer(str(folder))
    ((text, ids),) = asyncio.run(ask(port, [request(PROMPTS[3])]))
    assert ids == expected[3] and len(ids) > 5
    assert whole_characters(text) == whole_characters(tokenizer.decode(ids))


def test_32_at_once_get_the_same_as_alone_and_limits_hold(port, folder, expected):
    tokenizer = load_tokenizer(str(folder))
    answers = asyncio.run(ask(port, [request(p) for p in PROMPTS]))
    assert [ids for _, ids in answers] == expected
    for text, ids in answers:
        assert whole_characters(text) == whole_characters(tokenizer.decode(ids))
    limits = [1, 2, 5, NEW]
    answers = asyncio.run(ask(port, [request(PROMPTS[i], n) for i, n in enumerate(limits)]))
    assert [ids for _, ids in answers] == [expected[i][:n] for i, n in enumerate(limits)]


def token_request(ids, limit=NEW):
    from jetstream.core.proto import jetstream_pb2

    content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=ids)
    return jetstream_pb2.DecodeRequest(token_content=content, max_tokens=limit)


def test_a_request_that_cannot_be_sampled_fails_alone(port, folder, expected):
    import grpc
    from jetstream.core.proto import jetstream_pb2

    tokenizer = load_tokenizer(str(folder))
    size = tokenizer.vocab_size
    bad = {
        "prompt is empty": [request(""), token_request([])],
        f"from 0 to {size - 1}": [
            token_request([5, size]),
            token_request([-1]),
            token_request([7, -(2**31)]),
        ],
        "must be from 1 to 64": [request(PROMPTS[0], 0), request(PROMPTS[0], 65), token_request([5], -3)],
        "at most 64": [request("a" * 65), token_request([5] * 65)],
        "neither text_content": [jetstream_pb2.DecodeRequest(max_tokens=3)],
    }

    async def all_at_once():
        good = [request(PROMPTS[0]), token_request(tokenizer.encode(PROMPTS[1])), token_request([size - 1])]
        requests = [*[r for group in bad.values() for r in group], *good]
        return await asyncio.gather(*(ask(port, [r]) for r in requests), return_exceptions=True)

    answers = asyncio.run(all_at_once())
    for message in [message for message, group in bad.items() for _ in group]:
        answer = answers.pop(0)
        assert isinstance(answer, grpc.aio.AioRpcError)
        assert answer.code() == grpc.StatusCode.INVALID_ARGUMENT and message in answer.details()
    assert [answer[0][1] for answer in answers[:2]] == expected[:2]
    assert isinstance(answers[2], list)


def test_the_load_tester_gets_the_right_ids(port, folder, expected, monkeypatch):
    # A script beside it, which grades answers with further packages: not asked for here.
    grader = types.ModuleType("eval_accuracy")
    grader.eval_accuracy = None
    monkeypatch.setitem(sys.modules, "eval_accuracy", grader)
    from benchmarks import benchmark_serving as load

    tokenizer = load_tokenizer(str(folder))
    requests = [load.InputRequest(p, len(p), "", NEW, i) for i, p in enumerate(PROMPTS)]
    figures, outputs = asyncio.run(
        load.benchmark(f"localhost:{port}", tokenizer, requests, float("inf"), True, "", 0)
    )
    assert [list(o.generated_token_list) for o in outputs] == expected
    assert figures["completed"] == 32
