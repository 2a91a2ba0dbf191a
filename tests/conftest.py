"""Tests run on eight virtual CPU devices; the flags must be set before jax starts its backend."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import pathlib

import pytest


@pytest.fixture(scope="session")
def fixtures() -> pathlib.Path:
    """Folder of the reference goldens (see its README)."""
    return pathlib.Path(__file__).parent / "fixtures"
