"""Tests run on eight virtual CPU devices; the flags must be set before jax starts its backend."""

import atexit
import importlib.util
import os
import shutil
import tempfile
import uuid

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:  # compiling is most of the tests' time
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # many tests compile the same small programs
    folder = tempfile.mkdtemp(prefix="jaxrl-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import functools
import json
import pathlib
import types

import numpy as np
import pytest


@pytest.fixture(scope="session")
def fixtures() -> pathlib.Path:
    """Folder of the reference goldens (see its README)."""
    return pathlib.Path(__file__).parent / "fixtures"


@functools.cache
def _trained(kind: str):
    """A small tokenizer of ``kind``, as converters write them, with <s> before a text and </s>."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    bos = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    first, alphabet = ["<unk>", "<s>", "</s>"], []
    if byte_level := kind.startswith("byte_level"):
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "byte_level_prefix")
        backend.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
        backend.post_processor = processors.Sequence([processors.ByteLevel(), bos])
    else:  # bytes stand for characters the vocabulary has not, as in Llama 2
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()  # while it is trained: no token goes over a space
        backend.post_processor = bos
        first += [f"<0x{i:02X}>" for i in range(256)]
    texts = [
        "What is 3 + 4? The answer is 42. foo bar foobar [INST] [/INST] user model tool ok 0 1 2 5 6 7 8 9"
    ]
    options = {"special_tokens": first, "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(3 * texts, trainers.BpeTrainer(vocab_size=420, **options))
    if not byte_level:
        prefix = [normalizers.Prepend("\u2581")] if kind == "prepend" else []
        if kind.startswith("metaspace"):
            scheme = kind.removeprefix("metaspace_")
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        else:
            backend.pre_tokenizer = None
            backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
        strip = [] if kind in ("no_prefix", "metaspace_never") else [decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    described = json.loads(backend.to_str())
    described["added_tokens"] = described["added_tokens"][:3]  # bytes are not special
    return json.dumps(described)


@pytest.fixture(
    params=["byte_level", "byte_level_prefix", "prepend", "no_prefix"]
    + [f"metaspace_{scheme}" for scheme in ("first", "always", "never")]
)
def trained(request, make_trained):
    """Small tokenizers of every kind, as transformers has them: BPE of bytes, with and without a space before
    a text, and as SentencePiece's are converted, with byte fallback."""
    return make_trained(request.param)


@pytest.fixture(scope="session")
def make_trained():
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(kind: str, **options):
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        backend = tokenizers.Tokenizer.from_str(_trained(kind))
        return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)

    return make


@pytest.fixture(scope="session")
def _gcs():
    """(scripts/gcs_emulator.py, URL of a running one)"""
    if not all(map(importlib.util.find_spec, ("gcsfs", "gcp_storage_emulator"))):
        pytest.skip("needs gcsfs and gcp-storage-emulator")
    path = pathlib.Path(__file__).parents[1] / "scripts" / "gcs_emulator.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.emulator() as url:
        yield module, url


@pytest.fixture
def gcs(_gcs, monkeypatch) -> str:
    """A folder of its own in the bucket ``bucket`` of a GCS emulator over HTTP, without credentials."""
    module, url = _gcs
    for name in module.VARIABLES:
        monkeypatch.setenv(name, url)
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def adam() -> types.SimpleNamespace:
    """What the order of additions may change of a run whose optim.eps is its learning rate, anywhere."""
    gradient = 1e-5  # contract 4: of a gradient's norm, which is clipped to 1

    def bound(updates: int) -> float:
        """Largest change of a parameter after ``updates`` updates.

        An update is u = lr m / (sqrt(v) + eps), where m is a mean of the gradients, sqrt(v) their quadratic
        mean, and |m| at most about sqrt(v). A change d of the gradients moves m and sqrt(v) by at most d,
        hence u by at most 2 lr d / eps. With the usual eps of 1e-8 nothing bounds it: an entry whose gradient
        is all rounding, 1e-9 here and -1e-9 there, moves by lr one way or the other.
        """
        return 2 * updates * gradient

    def assert_same_gradients(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
        """Compare the first moments after one update, (1 - b1) times the gradients: optimizer arrays."""
        moments = [name for name in one if ".mu." in name]
        assert moments
        for name in moments:
            assert np.linalg.norm(one[name] - two[name]) <= gradient * np.linalg.norm(one[name]), name

    return types.SimpleNamespace(gradient=gradient, bound=bound, assert_same_gradients=assert_same_gradients)
