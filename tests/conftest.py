"""Tests run on eight virtual CPU devices; the flags must be set before jax starts its backend."""

import atexit
import os
import shutil
import tempfile

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
