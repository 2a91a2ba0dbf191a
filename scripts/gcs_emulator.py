"""A Google Cloud Storage over HTTP on this machine, for tests (pip install gcp-storage-emulator).

    python scripts/gcs_emulator.py 9023 &
    export STORAGE_EMULATOR_HOST=http://localhost:9023 TENSORSTORE_GCS_HTTP_URL=http://localhost:9023
    python -m jaxrl.train ... checkpoint.output_dir=gs://bucket/runs

It holds one bucket, ``bucket``, in memory, and needs no credentials.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

BUCKET = "bucket"
VARIABLES = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")


def serve(port: int) -> None:
    """The emulator, with the one header that TensorStore needs and it leaves out of downloads."""
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers import objects

    original = objects.download

    def download(request, response, storage, *args, **kwargs):
        original(request, response, storage, *args, **kwargs)
        if response.status < 300:
            found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
            response["x-goog-generation"] = found["generation"]

    for _, methods in server.HANDLERS:
        for method, handler in methods.items():
            if handler is original:
                methods[method] = download
    objects.download = download
    server.create_server("localhost", port, in_memory=True, default_bucket=BUCKET).run()


@contextlib.contextmanager
def emulator() -> Iterator[str]:
    """A running emulator; gives its URL."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, str(port)], stderr=subprocess.DEVNULL)
    url = f"http://localhost:{port}"
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url)
                break
            time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


def use(url: str) -> str:
    """Let this process's checkpoints go to the emulator; gives the address of its bucket."""
    os.environ |= dict.fromkeys(VARIABLES, url)
    return f"gs://{BUCKET}"


if __name__ == "__main__":
    serve(int(sys.argv[1]))
