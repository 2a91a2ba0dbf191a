"""The sampling engine from the outside: what is sampled, its log-probs, and that the schedule cannot change
either."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.compile.compilations import CompilationCounter
from jaxrl.config import ConfigError
from jaxrl.learn.learner import Learner
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named
from jaxrl.models import Model, ModelConfig
from jaxrl.recipes.grpo import Grpo
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sampler import Sampler, rollout
from jaxrl.rollout.sampling import EVAL_STREAM, TRAIN_STREAM
from jaxrl.types import Prompts, TrainBatch

SCRATCH = dict(
    model_type="qwen3",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
VOCAB, LIMIT = 101, 96
"""Rows of the model's vocabulary, and ids that stand for text."""
STOP = 7


class Letters:
    """Decodes id i to one character."""

    def decode(self, ids, *, skip_special=False):
        return "".join(chr(ord("0") + i % 64) for i in ids)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def model():
    return Model(ModelConfig.from_scratch(SCRATCH, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def params(model):
    """Random weights, spread so that the next token is neither certain nor arbitrary."""
    return jax.tree.map(lambda x: 5 * x if x.ndim > 2 else x, model.init(jax.random.key(0), one_device()))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, LIMIT, n).astype(np.int32) for n in (5, 17, 9, 23, 1)]
    return Prompts(ids=[3, 14, 15, 92, 65], tokens=tokens, texts=[""] * 5, examples=[{}] * 5)


@functools.cache
def default_engine(model):
    return make_engine(model, one_device())


def make_engine(model, mesh=None, **changes):
    if mesh is None and not changes:
        return default_engine(model)
    options = dict(
        slots=20,
        prefill_rows=5,
        max_prompt_tokens=24,
        max_new_tokens=16,
        prefill_chunk_tokens=8,
        steps_per_dispatch=5,
        stop_ids=(STOP,),
        vocab_limit=LIMIT,
        filters=False,
    )
    return Engine(model, mesh or one_device(), **{**options, **changes})


def sample(model, params, prompts, engine, *, group=4, seed=0, stream=TRAIN_STREAM, **sampling):
    options = Sampling(**{"max_new_tokens": 16, **sampling})
    sampler = make_sampler(engine, model.unstack(params), seed=seed)
    return rollout(sampler, prompts, group_size=group, sampling=options, stream=stream)


def make_sampler(engine, rollout_params, seed=0):
    sampler = Sampler(engine, Letters(), seed=seed)
    sampler.swap(rollout_params, 0)
    return sampler


def ids_of(out):
    return [s.tokens.tolist() for s in out.samples]


def log_probs_of(out):
    return [s.rows[0].rollout_log_probs for s in out.samples]


def reasons_of(out):
    return [s.stop_reason for s in out.samples]


def same(a, b):
    return ids_of(a) == ids_of(b)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_log_probs_are_the_trainers(model, params, prompts, temperature):
    """Contract 1: the training forward pass gives the sampler's log-probs, first token and stop token
    included."""
    out = sample(model, params, prompts, make_engine(model), temperature=temperature)
    assert {"stop", "length"} == set(reasons_of(out))
    rows = len(out)
    tokens = np.zeros((rows, 48), np.int32)
    mask, segments, expected = (np.zeros((rows, 48), np.float32) for _ in range(3))
    for i, (completion, log_probs) in enumerate(zip(ids_of(out), log_probs_of(out), strict=True)):
        prompt = prompts.tokens[i // 4]
        end = len(prompt) + len(completion)
        tokens[i, :end] = np.concatenate([prompt, completion])
        segments[i, :end] = 1
        mask[i, len(prompt) : end] = 1
        expected[i, len(prompt) : end] = log_probs
    micro = TrainBatch(
        tokens=tokens,
        positions=np.tile(np.arange(48), (rows, 1)),
        segment_ids=segments.astype(np.int32),
        loss_mask=mask,
        loss_weights=mask,
    )
    learner = Learner(
        model=model, mesh=one_device(), loss=Grpo().loss, temperature=temperature, vocab_limit=LIMIT
    )
    log_probs, _ = jax.jit(lambda p, m: learner.statistics(p, m))(params, micro)
    assert np.abs(np.asarray(log_probs) - expected).max() < 1e-4


def test_stop_tokens_end_a_completion_and_belong_to_it(model, params, prompts):
    out = sample(model, params, prompts, make_engine(model))
    for ids, reason in zip(ids_of(out), reasons_of(out), strict=True):
        assert STOP not in ids[:-1]
        assert (reason == "stop") == (ids[-1] == STOP)
        assert len(ids) == 16 or reason == "stop"
        assert max(ids) < LIMIT


def test_samples_of_a_group_differ_and_so_do_seeds_and_streams(model, params, prompts):
    engine = make_engine(model)
    out = sample(model, params, prompts, engine)
    assert len(set(map(tuple, ids_of(out)))) > 15
    assert not same(out, sample(model, params, prompts, engine, seed=1))
    assert not same(out, sample(model, params, prompts, engine, stream=EVAL_STREAM))
    assert same(out, sample(model, params, prompts, engine))


@pytest.mark.parametrize(
    "changes",
    [
        dict(slots=3),
        dict(slots=7, prefill_rows=2, steps_per_dispatch=1),
        dict(prefill_chunk_tokens=24),
        dict(slots=64),
    ],
)
def test_schedule_does_not_change_the_samples(model, params, prompts, changes):
    """Slots, refills, prefill batches, chunks and dispatches: same ids for the same seed."""
    expected = sample(model, params, prompts, make_engine(model))
    got = sample(model, params, prompts, make_engine(model, **changes))
    assert same(expected, got)
    for a, b in zip(log_probs_of(expected), log_probs_of(got), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("split", [dict(data=8), dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, tensor=4)])
def test_mesh_does_not_change_the_samples(model, params, prompts, split):
    expected = sample(model, params, prompts, make_engine(model))
    mesh = make_mesh(MeshConfig(**{"data": 1, **split}))
    sharded = Model(model.config, mesh=mesh)
    moved = jax.device_put(jax.tree.map(np.asarray, params), named(mesh, sharded.specs(mesh)))
    refresh = jax.jit(sharded.unstack, out_shardings=named(mesh, sharded.specs(mesh, view="rollout")))
    got = rollout(
        make_sampler(make_engine(sharded, mesh), refresh(moved)),
        prompts,
        group_size=4,
        sampling=Sampling(max_new_tokens=16),
        stream=TRAIN_STREAM,
    )
    assert same(expected, got)


@pytest.fixture(scope="module")
def alike(prompts):
    """Prompts of which all begin with the same 13 tokens, and two are the same up to their last."""
    start = np.arange(13, dtype=np.int32)
    tokens = [np.concatenate([start, t[:8]]) for t in prompts.tokens]
    tokens[1] = np.append(tokens[3][:-1], 5).astype(np.int32)
    return dataclasses.replace(prompts, tokens=tokens)


@pytest.mark.parametrize(
    "changes",
    [
        dict(share_prompts=True, page_tokens=4),
        dict(share_prompts=True, page_tokens=4, slots=6, cache_bytes=16 * 4 * 512, decode_batches=3),
    ],
)
def test_sharing_pages_and_a_small_cache_do_not_change_the_samples(model, params, alike, changes):
    """Group prompts and common starts computed once and shared, or everything by itself in one page; room for
    one and a half sequences, or for all."""
    expected = sample(model, params, alike, make_engine(model, share_prompts=False, page_tokens=64))
    engine = make_engine(model, **changes)
    assert "cache_bytes" not in changes or engine.cache.geometry.pages == 16
    assert same(expected, sample(model, params, alike, engine))


def test_common_starts_are_computed_once(model, params, alike):
    """16 tokens = 2 chunks of 8; of the start, 8 tokens = 1 chunk, are shared by all."""
    chunks = []
    engine = make_engine(model, page_tokens=4)
    sample(model, params, alike, engine)
    for name in ("_prefill_one", "_prefill_many"):
        run = getattr(engine, name)
        setattr(engine, name, lambda *a, run=run: chunks.append(a[1].shape[0]) or run(*a))
    sample(model, params, alike, engine)
    assert chunks == [1, 5, 5]


def test_kernel_and_gathered_pages_give_the_same_samples(params, prompts):
    """The TPU kernel (interpreted) against the gathered cache, with full and sliding-window layers, whose
    ring of pages goes round."""
    types = ["sliding_attention", "full_attention"]
    scratch = {
        **SCRATCH,
        "model_type": "qwen2",
        "layer_types": types,
        "sliding_window": 9,
        "use_sliding_window": True,
    }
    model = Model(ModelConfig.from_scratch(scratch, vocab_size=VOCAB))
    assert [kind.window for kind in model.config.layers] == [9, None]
    params = jax.tree.map(lambda x: 5 * x if x.ndim > 2 else x, model.init(jax.random.key(0), one_device()))
    options = dict(page_tokens=16, slots=8)
    whole = sample(model, params, prompts, make_engine(model, page_tokens=64, slots=8))
    assert same(whole, sample(model, params, prompts, make_engine(model, **options)))
    engine = make_engine(model, decode_attention="pallas", **options)
    assert engine.cache.geometry.rings == {9: 2} and engine.in_place
    assert same(whole, sample(model, params, prompts, engine))


def test_more_sequences_than_slots_one_prompt_and_one_too_many(model, params, prompts):
    engine = make_engine(model, slots=8)
    expected = sample(model, params, prompts, make_engine(model))
    one = sample(model, params, prompts.take([1]), engine, group=9)
    assert same(sample(model, params, prompts, engine), expected)
    assert ids_of(one)[:4] == ids_of(expected)[4:8]


def test_the_tail_runs_in_smaller_batches(model, params, prompts):
    """Few long sequences among many short ones: their steps are steps of a small batch."""
    engine = make_engine(model, slots=8, decode_batches=4, stop_ids=())
    assert engine.batches == [1, 2, 4, 8]
    rows = []
    generate = engine.generate

    def watched(params, state, **options):
        state, results = generate(params, state, **options)
        rows.append((next(n for n in engine.batches if n >= len(results.slots)), int(results.counts.max())))
        return state, results

    engine.generate = watched
    limits = [2] * 7 + [16]
    out = rollout(
        make_sampler(engine, model.unstack(params)),
        prompts.take([0, 1]),
        group_size=4,
        sampling=[Sampling(max_new_tokens=n) for n in limits],
        stream=TRAIN_STREAM,
    )
    assert out.lengths.tolist() == limits
    assert sum(batch * steps for batch, steps in rows) == 8 * 2 + 14


def test_each_sequence_has_its_own_sampling(model, params, prompts):
    engine = make_engine(model, stop_ids=(), filters=True)
    greedy = sample(model, params, prompts.take([0]), engine, group=1, temperature=0.0)
    free = sample(model, params, prompts.take([0]), engine, group=3)
    settings = [Sampling(max_new_tokens=16), Sampling(max_new_tokens=5), Sampling(max_new_tokens=16, top_k=1)]
    out = rollout(
        make_sampler(engine, model.unstack(params)),
        prompts.take([0]),
        group_size=3,
        sampling=settings,
        stream=TRAIN_STREAM,
    )
    assert ids_of(out) == [ids_of(free)[0], ids_of(free)[1][:5], ids_of(greedy)[0]]


def test_filters_need_an_engine_that_has_them(model, params, prompts):
    with pytest.raises(ValueError, match="top_k, top_p and min_p need an engine with filters"):
        sample(model, params, prompts, make_engine(model), top_k=3)


def test_several_stop_ids(model, params, prompts):
    free = sample(model, params, prompts, make_engine(model, stop_ids=()))
    out = sample(model, params, prompts, make_engine(model, stop_ids=(STOP, 11, 40)))
    for ids, all_ids, reason in zip(ids_of(out), ids_of(free), reasons_of(out), strict=True):
        hits = np.flatnonzero(np.isin(all_ids, [STOP, 11, 40]))
        assert ids == all_ids[: hits[0] + 1 if hits.size else 16]
        assert reason == ("stop" if hits.size else "length")


def test_part_of_the_prompts_gives_the_same_samples(model, params, prompts):
    """A sample's noise belongs to its prompt id and number, not to its place in the batch."""
    everything = sample(model, params, prompts, make_engine(model))
    some = Prompts(ids=prompts.ids[2:4], tokens=prompts.tokens[2:4], texts=["", ""], examples=[{}, {}])
    part = sample(model, params, some, make_engine(model))
    assert ids_of(part) == ids_of(everything)[8:16]


def test_greedy_is_argmax_of_the_training_forward(model, params, prompts):
    out = sample(model, params, prompts, make_engine(model, stop_ids=()), group=1, temperature=0.0)
    for prompt, ids in zip(prompts.tokens, ids_of(out), strict=True):
        tokens = np.concatenate([prompt, ids])[None]
        hidden, _ = model.hidden_states(params, tokens, np.arange(tokens.size)[None], np.ones_like(tokens))
        logits = (hidden[0] @ model.head(params).T)[:, :LIMIT]
        assert np.argmax(logits, -1)[len(prompt) - 1 : -1].tolist() == ids


def test_stop_strings_cut_the_text_but_not_the_ids(model, params, prompts):
    engine = make_engine(model, stop_ids=())
    free = sample(model, params, prompts, engine)
    stop = free.texts[0][5:8]
    out = sample(model, params, prompts, engine, stop=(stop,))
    assert out.texts[0] == free.texts[0][: free.texts[0].index(stop)]
    assert reasons_of(out)[0] == "stop"
    assert ids_of(out)[0] == ids_of(free)[0][: len(out.texts[0]) + 3]
    assert len(log_probs_of(out)[0]) == len(ids_of(out)[0])
    others = [i for i, text in enumerate(free.texts) if stop not in text]
    assert all(ids_of(out)[i] == ids_of(free)[i] for i in others)


def test_nothing_compiles_after_the_first_call(model, params):
    """Prompts of 5 to 60 tokens, alone, together and with a common start; limits 33 and 317; evaluation; stop
    ids and a seed of their own."""
    engine = make_engine(
        model,
        slots=8,
        max_prompt_tokens=60,
        max_new_tokens=317,
        steps_per_dispatch=32,
        decode_batches=2,
        filters=True,
    )
    sampler = make_sampler(engine, model.unstack(params))

    def go(lengths, group, **sampling):
        tokens = [np.arange(n, dtype=np.int32) for n in lengths]
        count = len(tokens)
        rollout(
            sampler,
            Prompts(ids=range(count), tokens=tokens, texts=[""] * count, examples=[{}] * count),
            group_size=group,
            sampling=Sampling(**sampling),
            stream=TRAIN_STREAM,
        )

    go([5], 1, max_new_tokens=2)
    with CompilationCounter() as counter:
        go([5, 60, 17], 4, max_new_tokens=33)
        go([41], 1, max_new_tokens=33)
        go([9, 33, 25, 60, 59, 8, 7], 1, max_new_tokens=7, temperature=0.0)
        go([5, 60], 3, max_new_tokens=317, top_p=0.9)
        go([9, 33, 25, 60, 59, 18], 1, max_new_tokens=7)  # the last is prefilled alone, from the common start
        go([12, 3], 2, max_new_tokens=40, stop_ids=(3, 4, 5), seed=9, stop=("zz",))
        assert counter.metrics()["compile/count"] == 0


def test_prompts_that_do_not_fit_are_refused(model, params, prompts):
    long = Prompts(ids=[0], tokens=[np.zeros(25, np.int32)], texts=[""], examples=[{}])
    with pytest.raises(ConfigError, match="24"):
        sample(model, params, long, make_engine(model))
    with pytest.raises(ConfigError, match="exceeds"):
        sample(model, params, prompts, make_engine(model), max_new_tokens=17)


def test_empty_slots_do_not_disturb_bfloat16(model, params, prompts):
    engine = make_engine(Model(model.config, compute_dtype="bfloat16"), cache_dtype=jnp.bfloat16)
    out = sample(model, params, prompts, engine, group=1)
    assert all(np.isfinite(lp).all() for lp in log_probs_of(out))
