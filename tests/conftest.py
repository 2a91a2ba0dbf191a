"""Tests run on eight virtual CPU devices; the flags must be set before jax starts its backend."""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
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
def _gcs_server():
    """A GCS emulator over HTTP, without credentials; the environment names it as long as the session
    lasts."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "gcp_storage_emulator",
        "start",
        "--host",
        "localhost",
        "--port",
        str(port),
    ]
    server = subprocess.Popen([*command, "--default-bucket", "bucket", "-M", "-q"], stderr=subprocess.DEVNULL)
    url = f"http://localhost:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(url)
            break
        except OSError:
            time.sleep(0.1)
    yield url
    server.kill()


@pytest.fixture
def gcs(_gcs_server, monkeypatch) -> str:
    """A folder of its own in the emulator's ``bucket``."""
    for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.setenv(name, _gcs_server)
    return uuid.uuid4().hex
