"""A few of the kills that ``scripts/kill_checkpoints.py`` does by the hundred."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "kill_checkpoints.py"


@pytest.mark.slow
@pytest.mark.parametrize("storage", [["--rounds", "6"], ["--rounds", "4", "--gcs"]], ids=["local", "gcs"])
def test_processes_killed_while_saving_continue_exactly(storage):
    if "--gcs" in storage and not all(map(importlib.util.find_spec, ("gcsfs", "gcp_storage_emulator"))):
        pytest.skip("needs gcsfs and gcp-storage-emulator")
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, SCRIPT, *storage], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "every process continued exactly" in done.stdout
