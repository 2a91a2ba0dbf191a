"""A sampler that outlives a step: whatever else is submitted, cancelled or swapped, a request gets its own
tokens."""

import jax
import numpy as np
import pytest

from jaxrl.compile.compilations import CompilationCounter
from jaxrl.config import ConfigError
from jaxrl.mesh.axes import make_mesh
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.sampler import Sampler, rollout
from jaxrl.rollout.sampling import EVAL_STREAM, TRAIN_STREAM
from jaxrl.rollout.state import Request
from jaxrl.types import Prompts, Row

SCRATCH = dict(
    model_type="qwen3",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
LIMIT = 96
START = np.arange(13, dtype=np.int32)


class Letters:
    """Decodes id i to one character."""

    def decode(self, ids, *, skip_special=False):
        return "".join(chr(ord("0") + i % 64) for i in ids)


@pytest.fixture(scope="module")
def model():
    return Model(ModelConfig.from_scratch(SCRATCH, vocab_size=101))


@pytest.fixture(scope="module")
def weights(model):
    """Rollout views of two sets of parameters: old and new."""

    def spread(seed):
        mesh = make_mesh(devices=jax.devices()[:1])
        return jax.tree.map(lambda x: 5 * x if x.ndim > 2 else x, model.init(jax.random.key(seed), mesh))

    return [model.unstack(spread(seed)) for seed in (0, 1)]


def make_engine(model, **changes):
    options = dict(
        slots=4,
        prefill_rows=3,
        max_prompt_tokens=24,
        max_new_tokens=16,
        prefill_chunk_tokens=8,
        page_tokens=4,
        steps_per_dispatch=3,
        vocab_limit=LIMIT,
        filters=False,
    )
    return Engine(model, make_mesh(devices=jax.devices()[:1]), **{**options, **changes})


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model)


def make_sampler(engine, params, version=0, seed=0):
    sampler = Sampler(engine, Letters(), seed=seed)
    sampler.swap(params, version)
    return sampler


def make_request(prompt_id, sample_index=0, **sampling):
    """Prompts begin alike: they share two pages, and more with those of the same remainder."""
    prompt = np.concatenate([START, np.full(1 + prompt_id % 5, 20 + prompt_id % 3, np.int32)])
    options = Sampling(**{"max_new_tokens": 16, **sampling})
    return Request(prompt=prompt, sampling=options, prompt_id=prompt_id, sample_index=sample_index)


def run(sampler):
    """Poll until nothing is left."""
    found = sampler.poll()
    while sampler.unfinished:
        found |= sampler.poll()
    return found


def alone(engine, params, request, **options):
    sampler = make_sampler(engine, params, **options)
    sampler.submit([request])
    (sample,) = run(sampler).values()
    return sample


def ids_of(sample):
    return sample.tokens.tolist()


def test_requests_get_what_they_get_alone(engine, weights):
    """Submitted while others decode, cancelled in the middle, and with the weights swapped under them."""
    old, new = weights
    sampler, asked, found = make_sampler(engine, old, 3), {}, {}

    def submit(*requests):
        ids = sampler.submit(requests)
        asked.update(zip(ids, requests, strict=True))
        return ids

    first = submit(*(make_request(p, g, max_new_tokens=(4, 16)[g]) for p in (0, 1, 2) for g in range(2)))
    found |= sampler.poll()
    found |= sampler.poll()
    second = submit(*(make_request(p, 7, max_new_tokens=n) for p, n in ((0, 7), (3, 16), (1, 16))))
    assert set(found) < {*first}
    cancelled = [first[1], second[2]]  # one that runs, one that waits
    sampler.cancel(cancelled)
    for _ in range(3):
        found |= sampler.poll()
    before = set(found)
    with CompilationCounter() as counter:
        sampler.swap(new, 4)
        third = submit(*(make_request(10 + p) for p in (0, 1, 2)), make_request(0, 9))
        found |= run(sampler)
        assert counter.metrics()["compile/count"] == 0

    assert found.keys() == asked.keys() - set(cancelled)
    across = 0
    for i, sample in found.items():
        assert sum(count for _, count in sample.versions) == len(sample.tokens)
        expected = [alone(engine, params, asked[i]) for params in weights]
        if i in before:
            assert sample.versions == ((3, len(sample.tokens)),)
        elif i in third:
            assert sample.versions == ((4, len(sample.tokens)),)
            assert ids_of(sample) == ids_of(expected[1]) != ids_of(expected[0])
        count = sum(count for version, count in sample.versions if version == 3)
        assert ids_of(sample)[:count] == ids_of(expected[0])[:count]
        across += len(sample.versions) == 2
    assert before and across


def test_prompts_that_wait_are_computed_anew_after_a_swap(engine, weights):
    """Neither a prefix that was ready nor the common start outlives the weights that computed it."""
    sampler = make_sampler(engine, weights[0], 3)
    ids = sampler.submit(requests := [make_request(p, g) for p in (0, 1, 2) for g in range(2)])
    assert sampler.poll() == {}
    sampler.swap(weights[1], 4)
    ids += sampler.submit(more := [make_request(10 + p) for p in range(3)])
    found = run(sampler)
    for i, request in list(zip(ids, requests + more, strict=True))[4:]:  # four had begun
        assert ids_of(found[i]) == ids_of(alone(engine, weights[1], request))
        assert found[i].versions == ((4, 16),)


def test_a_cancelled_request_frees_its_slot_and_pages(model, weights):
    """Room for two sequences: the third runs once another is cancelled, however often."""
    engine = make_engine(model, slots=2)
    sampler = make_sampler(engine, weights[0])
    for n in range(5):
        long = sampler.submit([make_request(5 * n), make_request(5 * n + 1)])
        (short,) = sampler.submit([make_request(5 * n + 2, max_new_tokens=1)])
        assert sampler.poll() == {} == sampler.poll()
        sampler.cancel(long[:1])
        assert list(sampler.poll()) == [short]
        sampler.cancel(long)
        assert sampler.poll() == {} and not sampler.unfinished


def test_settings_of_a_request_are_those_of_a_whole_run(model, engine, weights):
    """Stop ids, stop strings, limits and seeds of its own, or the engine's and the sampler's."""
    settings = [
        {},
        {"stop_ids": (11, 40, 50, 60, 70)},
        {"max_new_tokens": 5},
        {"seed": 3},
        {"stop": ("AB", "5")},
        {"stop_ids": (), "seed": 2**40 + 3},
        {"temperature": 0.0},
    ]
    wanted = [make_request(p, n, **own) for n, own in enumerate(settings) for p in range(4)]
    sampler = make_sampler(engine, weights[0])
    ids = sampler.submit(wanted)
    found = run(sampler)
    together = [found[i] for i in ids]
    stopping = make_engine(model, stop_ids=(11, 40, 50, 60, 70))
    for n, own in enumerate(settings):
        whole = make_sampler(stopping if own.get("stop_ids") else engine, weights[0], seed=own.get("seed", 0))
        kept = {name: value for name, value in own.items() if name not in ("stop_ids", "seed")}
        ids = whole.submit([make_request(p, n, **kept) for p in range(4)])
        everything = run(whole)
        expected = [everything[i] for i in ids]
        for a, b in zip(together[4 * n : 4 * n + 4], expected, strict=True):
            assert (ids_of(a), a.text, a.stop_reason) == (ids_of(b), b.text, b.stop_reason)
    reasons = [{s.stop_reason for s in together[4 * n : 4 * n + 4]} for n in range(len(settings))]
    assert reasons[0] == reasons[2] == reasons[5] == {"length"} and "stop" in reasons[1] & reasons[4]


def test_a_prompt_of_a_stream_has_numbers_of_its_own(engine, weights):
    """Not of the step: the same request gives the same tokens whenever it is sampled."""
    one = make_request(7)
    first = alone(engine, weights[0], one)
    again = make_sampler(engine, weights[0], version=5)
    run_before = again.submit([make_request(8)])
    assert list(run(again)) == run_before
    (i,) = again.submit([one])
    assert ids_of(run(again)[i]) == ids_of(first)
    others = [make_request(12), make_request(7, 1), make_request(7, seed=1)]
    assert all(ids_of(alone(engine, weights[0], other)) != ids_of(first) for other in others)


@pytest.fixture(scope="module")
def prompts():
    requests = [make_request(p) for p in range(5)]
    return Prompts(ids=range(5), tokens=[r.prompt for r in requests], texts=[""] * 5, examples=[{}] * 5)


def test_a_rollout_leaves_other_requests_alone_and_an_interrupted_one_nothing(engine, weights, prompts):
    sampler = make_sampler(engine, weights[0])
    options = dict(group_size=2, sampling=Sampling(max_new_tokens=9), stream=EVAL_STREAM)
    expected = [ids_of(s) for s in rollout(sampler, prompts, **options).samples]
    assert not sampler.unfinished
    (other,) = sampler.submit([make_request(3)])

    def stop(finished, tokens):
        if finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(sampler, prompts, progress=stop, **options)
    found = rollout(sampler, prompts, **options)
    assert [ids_of(s) for s in found.samples] == expected
    assert ids_of(run(sampler)[other]) == ids_of(alone(engine, weights[0], make_request(3)))


def test_an_idle_sampler_holds_no_device_memory(engine, weights, prompts):
    sampler = make_sampler(engine, weights[0])
    options = dict(group_size=3, sampling=Sampling(max_new_tokens=4), stream=TRAIN_STREAM)
    rollout(sampler, prompts, **options)

    def live():
        return sorted(x.unsafe_buffer_pointer() for x in jax.live_arrays() if x.size > 1000)

    before = live()
    sampler.submit([make_request(1)])
    sampler.poll()
    assert len(live()) > len(before)
    run(sampler)
    assert live() == before


def test_what_the_engine_cannot_take_is_refused_and_the_rest_goes_on(engine, weights):
    sampler = make_sampler(engine, weights[0])
    sampler.submit([make_request(0)])
    good = make_request(1)
    for bad, message in (
        (make_request(2, max_new_tokens=17), "exceeds the engine's 16"),
        (make_request(2, top_k=3), "need an engine with filters"),
        (make_request(2, stop_ids=range(9)), "more than 8 stop ids"),
        (Request(prompt=np.zeros(0, np.int32), sampling=Sampling(max_new_tokens=1), prompt_id=0), "1 to 24"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            sampler.submit([good, bad])
    assert len(run(sampler)) == 1


def test_rows_keep_the_versions_of_their_tokens():
    row = Row.of(START).sampled(np.arange(3), -np.ones(3), ((1, 3),))
    row = row.sampled(np.arange(2), -np.ones(2), ((1, 1), (2, 1))).observed(np.arange(4))
    assert row.versions == ((1, 4), (2, 5)) and row.loss_mask.tolist() == [1] * 5 + [0] * 4
    assert row.cut(4).versions == ((1, 4),) and row.cut(5).versions == ((1, 4), (2, 1))
    assert row.cut(2).versions == ((1, 2),) and len(row.cut(2).rollout_log_probs) == 2
