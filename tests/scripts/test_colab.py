"""The Colab notebook, installed and executed from end to end; here without a TPU, on few steps."""

import ast
import pathlib

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "scripts" / "colab" / "tpu_smoke.ipynb"


def test_the_notebook_is_valid_and_holds_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert all(cell.source.strip() for cell in notebook.cells)
    for cell in code:
        compile(cell.source, NOTEBOOK.name, "exec")
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxrl"):
                exec(ast.unparse(node), {})


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """The wheel it builds is what it trains with: ``site`` comes first on the kernel's path."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    (tmp_path / "site").mkdir()
    options = ["--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site")]
    parameters.source += f"\nSOURCE, PIP_OPTIONS = {str(ROOT)!r}, {options}"
    parameters.source += "\nSFT_STEPS, GRPO_STEPS, EVAL_ROWS = 2, 1, 8"
    last = notebook.cells[-1]
    last.source += "\nprint(jaxrl.__path__[0])"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    data = [kind for output in outputs for kind in output.get("data", {})]
    assert "image/png" in data and "text/html" in data
    assert "all kernels agree" in text and text.count(" ms") >= 10
    assert str(tmp_path / "site" / "jaxrl") in text
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
