"""Tests that compile for TPU with libtpu's compiler, on the CPU."""

import pytest

from jaxrl.compile.tpu import compiler_missing


@pytest.fixture(autouse=True)
def _compiler():
    if missing := compiler_missing():
        pytest.skip(missing)
