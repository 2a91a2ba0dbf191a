"""Import from and export to Hugging Face folders: nothing lost, little held, misfits named."""

from __future__ import annotations

import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxrl.config import ConfigError
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named
from jaxrl.models import Model, ModelConfig, hf
from jaxrl.models.checkpoint_files import TensorFiles
from jaxrl.store import hub


def tensors_of(folder) -> dict[str, tuple[str, bytes]]:
    """Name -> (dtype, bytes) of all tensors of a folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():
                array = opened.get_tensor(name)
                found[name] = (str(array.dtype), array.tobytes())
    return found


def assert_equal(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(np.asarray(a), np.asarray(e)), actual, expected)


def copy_of(checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint.folder, folder, copy_function=shutil.copyfile)
    return folder


def test_round_trip_is_equal_bit_for_bit(checkpoint, tmp_path):
    config = json.loads((checkpoint.folder / "config.json").read_text())
    dtype = config.get("dtype", config.get("torch_dtype"))
    out = tmp_path / "out"
    hf.save_folder(checkpoint.params, checkpoint.model, out, checkpoint.folder, dtype=dtype)
    assert tensors_of(out) == tensors_of(checkpoint.folder)
    assert json.loads((out / "config.json").read_text()) == config
    for name in hub.TOKENIZER_FILES:
        if (checkpoint.folder / name).exists():
            assert (out / name).read_bytes() == (checkpoint.folder / name).read_bytes()
    assert (out / "tokenizer.json").exists() and (out / "generation_config.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_large_export_is_cut_into_shards_with_an_index(reference, tmp_path):
    c = reference.load("llama")
    hf.save_folder(c.params, c.model, tmp_path / "out", c.folder, max_shard_bytes=200_000)
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) >= 4
    assert all(p.stat().st_size < 205_000 for p in (tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert_equal(hf.load_params(tmp_path / "out", c.model), c.params)


def test_the_dtype_of_an_export_is_written_into_its_config(reference, tmp_path):
    c = reference.load("mistral")
    hf.save_folder(c.params, c.model, tmp_path / "out", c.folder)  # the parameters are float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    assert {dtype for dtype, _ in tensors_of(tmp_path / "out").values()} == {"float32"}
    loaded = hf.load_params(c.folder, c.model, param_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}


def test_a_model_from_scratch_is_exported_with_its_own_config_and_tokenizer(reference, tmp_path):
    class Tokenizer:
        def save(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    c = reference.load("gemma3_text_linear")
    hf.save_folder(c.params, c.model, tmp_path / "out", Tokenizer())
    assert hf.load_config(tmp_path / "out") == c.model.config
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert_equal(hf.load_params(tmp_path / "out", c.model), c.params)


def test_a_failed_export_leaves_nothing_behind(reference, tmp_path):
    class Tokenizer:
        def save(self, folder):
            raise OSError("disk full")

    c = reference.load("llama")
    with pytest.raises(OSError, match="disk full"):
        hf.save_folder(c.params, c.model, tmp_path / "out", Tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_an_export_overwrites_nothing(reference, tmp_path):
    c = reference.load("llama")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        hf.save_folder(c.params, c.model, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "gemma3_text"])
def test_import_into_a_mesh_gives_the_same_numbers_in_their_places(name, reference):
    c = reference.load(name)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = hf.load_params(c.folder, c.model, mesh)
    assert_equal(params, c.params)
    assert jax.tree.map(lambda x: x.sharding, params) == named(mesh, c.model.specs(mesh))


def test_import_and_export_hold_one_tensor_at_a_time(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4}
    model = Model(ModelConfig.from_scratch(sizes | {"tie_word_embeddings": True}, vocab_size=4096))
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), model.shapes())
    largest, total = 4096 * 256 * 4, sum(x.nbytes for x in jax.tree.leaves(params))
    assert total > 10 * largest

    def host_peak(function):
        tracemalloc.start()
        function()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert host_peak(lambda: hf.save_folder(params, model, tmp_path / "out")) < largest + 2**21
    assert host_peak(lambda: hf.load_params(tmp_path / "out", model)) < largest + 2**21


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


NORM, HEAD = "model.layers.1.input_layernorm.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


def drop(name):
    return lambda folder: change_tensors(folder, lambda tensors: tensors.pop(name))


def put(name, shape):
    return lambda folder: change_tensors(folder, lambda t: t.update({name: np.zeros(shape, np.float32)}))


def configure(**changes):
    return lambda folder: change_config(folder, **changes)


def remove(file):
    return lambda folder: (folder / file).unlink()


def write(file, text):
    return lambda folder: (folder / file).write_text(text)


OUTSIDE = '{"weight_map": {"a": "../x.safetensors"}}'
MISMATCHES = [
    # what is wrong, checkpoint, how it came about, what the message says
    ("missing tensor", "llama", drop(NORM), rf"'{NORM}' of shape \[64\] is missing"),
    ("wrong shape", "llama", put(NORM, 63), rf"'{NORM}' in model.safetensors has shape \[63\].*needs \[64\]"),
    ("unexpected tensor", "llama", put("extra", 3), "'extra' in model.safetensors is unexpected"),
    ("tied in the config only", "llama", configure(tie_word_embeddings=True), f"'{HEAD}'.*is true"),
    ("tied in the files only", "llama_tied", configure(tie_word_embeddings=False), f"'{HEAD}'.*is false"),
    ("other sizes", "qwen2", configure(intermediate_size=96), r"\[112, 64\].*needs \[96, 64\]"),
    ("missing shard", "llama_sharded", remove("model-00003-of-00006.safetensors"), "'model-00003.*missing"),
    ("no weights", "llama", remove("model.safetensors"), f"neither model.safetensors nor {INDEX}"),
    ("no safetensors", "llama", write("model.safetensors", "PK" * 99), "cannot be read as safetensors"),
    (
        "shard elsewhere",
        "llama_sharded",
        write(INDEX, OUTSIDE),
        "'../x.safetensors' is not a plain file name",
    ),
    ("no map", "llama_sharded", write(INDEX, "{}"), "needs a weight_map"),
]


@pytest.mark.parametrize(
    ("name", "spoil", "message"), [m[1:] for m in MISMATCHES], ids=[m[0] for m in MISMATCHES]
)
def test_files_that_do_not_match_are_refused_by_name(name, spoil, message, reference, tmp_path):
    folder = copy_of(reference.load(name), tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as error:
        hf.load_params(folder, Model(hf.load_config(folder)))
    assert str(folder) in str(error.value)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(reference, tmp_path):
    folder = copy_of(reference.load("llama_sharded"), tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][NORM] = "model-00001-of-00006.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"'{NORM}' is not in model-00001"):
        hf.load_params(folder, reference.load("llama_sharded").model)


def test_a_tensor_that_the_index_does_not_name_is_ignored(reference, tmp_path, caplog):
    """Leftovers in a shard, the same tensor in another shard, and shards nobody names, as in transformers."""
    c = reference.load("llama_sharded")
    folder = copy_of(c, tmp_path)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(index.values())) if file != index[NORM])
    stale = {"model.extra": np.zeros(3, np.float32), NORM: np.zeros(64, np.float32)}
    save_file(load_file(folder / other) | stale, folder / other)
    save_file(stale, folder / "model-00007-of-00007.safetensors")
    save_file(stale, folder / "consolidated.safetensors")
    with caplog.at_level("WARNING", "jaxrl"):
        assert_equal(hf.load_params(folder, c.model), c.params)
    assert f"2 tensors of its shards are not in {INDEX}" in caplog.text


def test_one_file_is_taken_before_an_index_as_in_transformers(reference, tmp_path, caplog):
    sharded, whole = reference.load("llama_sharded"), reference.load("llama")
    folder = copy_of(sharded, tmp_path)
    tensors = load_file(whole.folder / "model.safetensors")
    save_file(tensors | {NORM: tensors[NORM] + 1}, folder / "model.safetensors")
    with caplog.at_level("WARNING", "jaxrl"):
        files = TensorFiles(folder)
    np.testing.assert_array_equal(files.read(NORM, (slice(None),)), tensors[NORM] + 1)
    assert "the index is ignored" in caplog.text


def quantise(name, dtype, **more):
    """A tensor as quantised weights are kept, with ``more`` beside it."""
    return lambda folder: change_tensors(
        folder, lambda t: t.update({name: t[name].astype(dtype)}, **more) if name in t else t.update(more)
    )


UP = "model.layers.0.mlp.up_proj.weight"
PACKED = UP.replace("weight", "qweight")
QUANTISED = [
    ("fp8", quantise(UP, ml_dtypes.float8_e4m3fn), UP, "F8_E4M3"),
    ("fp8 e5m2", quantise(UP, ml_dtypes.float8_e5m2), UP, "F8_E5M2"),
    ("int8", quantise(UP, np.int8), UP, "I8"),
    ("bytes of 4 bits", quantise(UP, np.uint8), UP, "U8"),
    ("packed int4", quantise("", None, **{PACKED: np.zeros((8, 8), np.int32)}), PACKED, "I32"),
]


@pytest.mark.parametrize(
    ("spoil", "name", "dtype"), [q[1:] for q in QUANTISED], ids=[q[0] for q in QUANTISED]
)
def test_quantised_tensors_are_refused_before_anything_is_read(
    spoil, name, dtype, reference, tmp_path, monkeypatch
):
    c = reference.load("llama")
    folder = copy_of(c, tmp_path)
    spoil(folder)
    monkeypatch.setattr(TensorFiles, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match=rf"'{name}' in model.safetensors is {dtype} .*quantised weights"):
        hf.load_params(folder, c.model)


def test_the_text_part_of_a_multimodal_checkpoint(reference, tmp_path):
    c = reference.load("gemma3_text")
    folder = copy_of(c, tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = {f"language_model.{n}": x for n, x in load_file(c.folder / "model.safetensors").items()}
    tensors["vision_tower.vision_model.embeddings.patch_embedding.bias"] = np.zeros(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    model = Model(hf.load_config(folder))
    assert model.config == c.model.config
    params = hf.load_params(folder, model)
    assert_equal(params, c.params)
    hf.save_folder(params, model, tmp_path / "out", folder)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "Gemma3ForCausalLM"
    ]
    assert tensors_of(tmp_path / "out") == tensors_of(c.folder)


def test_names_of_folders_and_of_the_hub(reference, monkeypatch):
    folder = reference.load("llama").folder
    assert hf.resolve(str(folder)) == folder
    with pytest.raises(ConfigError, match=r"model.path: there is no folder './nowhere'"):
        hf.resolve("./nowhere")

    def snapshot(name, **_):
        return str(folder.parent / name.split("/")[1])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hf.resolve("owner/llama") == folder
    assert hf.load_config("owner/llama") == reference.load("llama").model.config

    def offline(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"'owner/llama' is no folder.*no route to host"):
        hf.resolve("owner/llama")


def test_a_folder_without_a_usable_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: missing"):
        hf.load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: is not JSON"):
        hf.load_config(tmp_path)
