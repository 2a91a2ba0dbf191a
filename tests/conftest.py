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
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # many tests compile the same small programs
    folder = tempfile.mkdtemp(prefix="jaxrl-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import pathlib

import pytest


@pytest.fixture(scope="session")
def fixtures() -> pathlib.Path:
    """Folder of the reference goldens (see its README)."""
    return pathlib.Path(__file__).parent / "fixtures"


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
