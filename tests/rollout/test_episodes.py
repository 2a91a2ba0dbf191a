"""Episodes of several turns: ids are only appended, the trainer agrees with every turn, the schedule changes
nothing, limits hold, and a bad environment costs its episode."""

import contextlib
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.compile.compilations import CompilationCounter
from jaxrl.config import ConfigError, UserCodeError
from jaxrl.data.chat import Renderer
from jaxrl.data.config import DataConfig
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.environments import EnvironmentConfig
from jaxrl.learn.learner import Learner
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named
from jaxrl.models import Model, ModelConfig
from jaxrl.recipes.grpo import Grpo
from jaxrl.rollout.config import Sampling
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.episodes import Episodes, MultiTurn
from jaxrl.rollout.sampler import Sampler, rollout
from jaxrl.rollout.sampling import TRAIN_STREAM
from jaxrl.rollout.state import Request
from jaxrl.types import Prompts, Row, TrainBatch

USER = str(Path(__file__).parent.parent / "environments" / "user_environments.py")
SCRATCH = dict(
    model_type="qwen3",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
WINDOWED = {**SCRATCH, "model_type": "mistral", "sliding_window": 12}
LIMIT = 16
"""Ids that are sampled: the special ones, eos among them, and a few signs; a turn has about 15 tokens."""
TOKENIZER = load_tokenizer("builtin:chars")
EOS = TOKENIZER.eos_id
NEW = 90
# Of earlier turns it shows the last character only, as others leave out the reasoning.
FORGETFUL = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'][-1:] + eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


@functools.cache
def make_model(kind="full"):
    """(model, parameters, engine)"""
    scratch = {"full": SCRATCH, "windowed": WINDOWED}[kind]
    model = Model(ModelConfig.from_scratch(scratch, vocab_size=TOKENIZER.vocab_size))
    params = model.init(jax.random.key(0), one_device())
    return model, jax.tree.map(lambda x: 5 * x if x.ndim > 2 else x, params), make_engine(model)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def multi_turn():
    """Makes them, and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def make(environment="Echo", data=None, on_error="abstain", **config):
            config = {"workers": 0, "turns": 4, **config}
            parts = MultiTurn(
                EnvironmentConfig(name=f"{USER}:{environment}", **config),
                Renderer(data or DataConfig(), TOKENIZER),
                TOKENIZER,
                on_error,
            )
            stack.callback(parts.close)
            return parts

        yield make


def make_prompts(parts, names="abcde"):
    rows = [{"name": name, "question": "?" * (1 + 3 * i % 7)} for i, name in enumerate(names)]
    made = [parts.renderer.prompt(row) for row in rows]
    ids = [3 + 11 * i for i in range(len(rows))]
    return Prompts(
        ids=ids,
        tokens=[p.tokens for p in made],
        texts=[p.text for p in made],
        examples=[p.example for p in made],
    )


def make_engine(model, mesh=None, **changes):
    options = dict(
        slots=20,
        prefill_rows=5,
        max_prompt_tokens=40,
        max_new_tokens=NEW,
        prefill_chunk_tokens=8,
        steps_per_dispatch=5,
        page_tokens=8,
        stop_ids=(EOS,),
        vocab_limit=LIMIT,
        multi_turn=True,
        filters=False,
    )
    return Engine(model, mesh or one_device(), **{**options, **changes})


def play(
    model, parts, engine=None, prompts=None, *, group=4, limit=NEW, params=None, stop=(), keep_special=False
):
    sampler = Sampler(engine or model[2], TOKENIZER, keep_special=keep_special, multi_turn=parts)
    sampler.swap(model[0].unstack(model[1]) if params is None else params, 0)
    return rollout(
        sampler,
        make_prompts(parts) if prompts is None else prompts,
        group_size=group,
        sampling=Sampling(max_new_tokens=limit, stop=stop),
        stream=TRAIN_STREAM,
    )


def request_of(prompts, p=0, g=0, limit=99):
    """For sample ``g`` of prompt ``p``."""
    return Request(
        prompt=prompts.tokens[p],
        sampling=Sampling(max_new_tokens=limit),
        prompt_id=prompts.ids[p],
        sample_index=g,
        text=prompts.texts[p],
        example=prompts.examples[p],
    )


def turn_of(ids):
    return Row.of(np.zeros(0, np.int32)).sampled(np.array(ids), np.zeros(len(ids)), ((0, len(ids)),))


def all_rows(out):
    return [row for sample in out.samples for row in sample.rows]


def same(a, b):
    a, b = all_rows(a), all_rows(b)
    return [(r.prompt.tolist(), r.tokens.tolist(), r.loss_mask.tolist()) for r in a] == [
        (r.prompt.tolist(), r.tokens.tolist(), r.loss_mask.tolist()) for r in b
    ]


def assert_trainer_agrees(model, out):
    """The training forward pass over each row gives the sampler's log-probs at the policy's tokens."""
    rows = all_rows(out)
    width = 40 + NEW + 6
    arrays = {k: np.zeros((len(rows), width)) for k in ("tokens", "segment_ids", "loss_mask", "log_probs")}
    for i, row in enumerate(rows):
        start, end = len(row.prompt), len(row.prompt) + len(row.tokens)
        arrays["tokens"][i, :end] = np.concatenate([row.prompt, row.tokens])
        arrays["segment_ids"][i, :end] = 1
        arrays["loss_mask"][i, start:end] = row.loss_mask
        arrays["log_probs"][i, start:end] = row.rollout_log_probs
        assert (row.rollout_log_probs[row.loss_mask == 0] == 0).all()
    mask = arrays["loss_mask"].astype(np.float32)
    micro = TrainBatch(
        tokens=arrays["tokens"].astype(np.int32),
        positions=np.tile(np.arange(width), (len(rows), 1)),
        segment_ids=arrays["segment_ids"].astype(np.int32),
        loss_mask=mask,
        loss_weights=mask,
    )
    learner = Learner(model=model[0], mesh=one_device(), loss=Grpo().loss, temperature=1.0, vocab_limit=LIMIT)
    log_probs, _ = jax.jit(lambda p, m: learner.statistics(p, m))(model[1], micro)
    assert (np.abs(np.asarray(log_probs) - arrays["log_probs"]) * mask).max() < 1e-4


def test_ids_are_only_appended_and_the_trainer_agrees_with_every_turn(model, multi_turn):
    parts = multi_turn()
    out = play(model, parts)
    turns = [e.turns for e in out.episodes]
    assert max(turns) == 4 and min(turns) == 1
    reasons = {s.stop_reason for s in out.samples}
    assert {"stop", "turns", "length"} >= reasons and len(reasons) > 1
    for s in out.samples:
        (row,), episode = s.rows, s.episode
        finished = row.tokens[-1] == EOS  # its room may end with the turn
        # What the ids say is the conversation as the template has it, up to what nobody has said yet.
        text = TOKENIZER.decode([*row.prompt, *row.tokens])
        said = [m for m in episode.messages if m["role"] == "tool"]
        whole = TOKENIZER.render(episode.messages[: 2 * episode.turns - 1 + 1], add_generation_prompt=False)
        assert whole.startswith(text)
        # The policy's tokens are its turns, each up to its eos; the rest is the environment's.
        own = TOKENIZER.decode(row.tokens[row.loss_mask > 0])
        wrote = "".join(
            m["content"] + ("<eos>" if n + 1 < episode.turns or finished else "")
            for n, m in enumerate(m for m in episode.messages if m["role"] == "assistant")
        )
        assert own == wrote
        between = TOKENIZER.decode(row.tokens[row.loss_mask == 0])
        assert between == "".join(f"<|tool|>{m['content']}<|assistant|>" for m in said[: episode.turns - 1])
        assert s.text == TOKENIZER.decode(
            TOKENIZER.encode(episode.messages[2 * episode.turns - 1]["content"]), skip_special=True
        )
        assert episode.reward == 0.5 * (episode.turns - 1 + finished)
    assert_trainer_agrees(model, out)


def test_episodes_come_and_go_while_others_run(model, multi_turn):
    """Submitted later, cancelled in the middle, under weights of another version: what stays is unchanged."""
    parts = multi_turn()
    expected, prompts = all_rows(play(model, parts)), make_prompts(parts)
    sampler = Sampler(model[2], TOKENIZER, multi_turn=parts)
    params = model[0].unstack(model[1])
    sampler.swap(params, 0)
    requests = [request_of(prompts, i // 4, i % 4, NEW) for i in range(20)]
    ids, found = sampler.submit(requests[:12]), {}
    for _ in range(3):
        found |= sampler.poll()
    ids += sampler.submit(requests[12:])
    found |= sampler.poll()
    cancelled = [i for i in ids if i not in found][::3]
    sampler.cancel(cancelled)
    sampler.swap(params, 1)
    while sampler.unfinished:
        found |= sampler.poll()
    assert len(found) + len(cancelled) == 20 and not found.keys() & set(cancelled)
    mixed = 0
    for i, sample in found.items():
        ((row,), old) = sample.rows, expected[ids.index(i)]
        assert (row.tokens == old.tokens).all() and (row.loss_mask == old.loss_mask).all()
        assert sum(count for _, count in row.versions) == len(row.tokens)
        mixed += [version for version, _ in row.versions] == [0, 1]
    assert mixed


def test_the_answer_to_a_cancelled_episode_is_dropped(multi_turn):
    parts = multi_turn()
    episodes, prompts = Episodes(parts), make_prompts(parts, "ab")
    for i in (0, 1):
        episodes.begin(i, request_of(prompts, i))
        assert episodes.turn_ended(i, turn_of([9, EOS]), stopped=True, text="", overshoot=0)
    episodes.cancel([0])
    assert [i for i, _ in episodes.poll(block=True)] == [1] and not episodes.waiting


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(slots=3),
        dict(slots=7, prefill_rows=2, prefill_chunk_tokens=40, share_prompts=False, page_tokens=32),
    ],
)
def test_schedule_does_not_change_the_episodes(model, multi_turn, changes):
    """33 episodes, in few slots or all at once, with steps in processes that answer in any order."""
    names = "abcdefghijk"
    parts = multi_turn()
    expected = play(model, parts, prompts=make_prompts(parts, names), group=3)
    parts = multi_turn(workers=2, timeout_seconds=60)
    got = play(model, parts, make_engine(model[0], **changes), make_prompts(parts, names), group=3)
    assert len(got) == 33 and same(expected, got)
    assert [e.reward for e in expected.episodes] == [e.reward for e in got.episodes]


@pytest.mark.slow
def test_mesh_does_not_change_the_episodes(model, multi_turn):
    parts = multi_turn()
    expected = play(model, parts)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    sharded = Model(model[0].config, mesh=mesh)
    moved = jax.device_put(jax.tree.map(np.asarray, model[1]), named(mesh, sharded.specs(mesh)))
    refresh = jax.jit(sharded.unstack, out_shardings=named(mesh, sharded.specs(mesh, view="rollout")))
    got = play((sharded, moved), parts, make_engine(sharded, mesh), params=refresh(moved))
    assert same(expected, got)


@pytest.mark.parametrize("kind", ["full", pytest.param("windowed", marks=pytest.mark.slow)])
def test_a_template_that_rewrites_history_splits_rows(kind, multi_turn, tmp_path):
    """Each row is what the policy saw: a prompt as the template has it, and one turn."""
    (tmp_path / "forgetful.jinja").write_text(FORGETFUL)
    model = make_model(kind)
    parts = multi_turn(data=DataConfig(chat_template=str(tmp_path / "forgetful.jinja")))
    out = play(model, parts, group=3)
    assert sum(len(s.rows) - 1 for s in out.samples) > 5
    for s in out.samples:
        rows, episode = s.rows, s.episode
        assert len(rows) <= episode.turns
        for row in rows:
            assert len(row.prompt) + len(row.tokens) <= len(rows[0].prompt) + NEW
        last = rows[-1]
        if len(rows) == episode.turns > 1:  # every turn was rewritten
            seen = episode.messages[: 2 * episode.turns - 1]
            rendered = parts.renderer.following(seen, "", {})
            assert last.prompt.tolist() == TOKENIZER.encode(rendered)
            assert (last.loss_mask == 1).all()
    assert_trainer_agrees(model, out)
    if kind == "windowed":  # its rows begin anew, in slots they have to wait for
        again = play(model, parts, make_engine(model[0], slots=2, steps_per_dispatch=3), group=3)
        assert same(out, again)


@pytest.mark.parametrize("kind", ["full", "windowed"])
def test_stop_strings_end_turns_and_what_was_sampled_beyond_is_forgotten(kind, multi_turn):
    model = make_model(kind)
    parts = multi_turn(data=DataConfig(chat_template="none"))
    engine = make_engine(model[0], stop_ids=(), steps_per_dispatch=16)
    out = play(model, parts, engine, stop=("!", '"'))
    assert max(e.turns for e in out.episodes) > 1
    for s in out.samples:
        (row,) = s.rows
        turns = [m["content"] for m in s.episode.messages if m["role"] == "assistant"]
        cut = s.stop_reason == "length"
        assert all(t[-1] in '!"' and not set('!"') & set(t[:-1]) for t in turns[: len(turns) - cut])
        assert TOKENIZER.decode(row.tokens[row.loss_mask > 0]) == "".join(turns)
        assert "!" not in s.text
    assert_trainer_agrees(model, out)
    if kind == "full":  # one token a dispatch leaves nothing to forget
        one_by_one = make_engine(model[0], stop_ids=(), slots=3, steps_per_dispatch=1)
        assert same(out, play(model, parts, one_by_one, stop=("!", '"')))


SPACED = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}<s>[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
VERBATIM = SPACED.replace(" {{ m.content }}</s>", "{{ m.content }}</s>")


@pytest.mark.parametrize("template", [SPACED, VERBATIM, "none"])
def test_turns_after_an_answer_have_the_ids_of_the_whole_conversation(trained, template, tmp_path):
    (tmp_path / "t.jinja").write_text(template)
    chat_template = "none" if template == "none" else str(tmp_path / "t.jinja")
    tokenizer = Tokenizer(hf=trained)
    renderer = Renderer(DataConfig(chat_template=chat_template), tokenizer)
    config = EnvironmentConfig(name=f"{USER}:Echo", args={"room": 6}, workers=0, observation_tokens=20)
    with contextlib.closing(MultiTurn(config, renderer, tokenizer)) as parts:
        prompts = make_prompts(parts, "a")
        episodes = Episodes(parts)
        episodes.begin(0, request_of(prompts))
        text, ids = prompts.texts[0], prompts.tokens[0].tolist()
        for turn in (1, 2):
            sampled = tokenizer.encode_after(text, f" foo bar{turn}</s>")
            episodes.turn_ended(0, turn_of(sampled), stopped=True, text="", overshoot=0)
            ((_, following),) = episodes.poll(block=True)
            text += f" foo bar{turn}</s>"
            text += f"a{turn}:o bar{turn}" if template == "none" else f"<s>[INST] a{turn}:o bar{turn} [/INST]"
            assert following.tokens[: len(ids) + len(sampled)].tolist() == ids + sampled
            ids = following.tokens.tolist()
            assert ids == trained(text, add_special_tokens=template == "none").input_ids
        assert len(episodes.finish(0).rows) == 1


@pytest.mark.parametrize("keep", [True, False])
def test_rewards_read_one_text_however_a_sample_ended(model, multi_turn, keep):
    """The ids without the stop id, as transformers decodes them, up to a stop string: in single turns, and of
    an episode's last turn."""
    ended = {}
    for environment in (None, multi_turn(turns=2)):
        prompts = make_prompts(multi_turn())
        options = dict(prompts=prompts, stop=('"',), keep_special=keep, limit=40)
        out = play(model, environment, **options)
        for s in out.samples:
            (row,), text = s.rows, s.text
            ids = row.tokens[1 + max(np.flatnonzero(row.loss_mask == 0), default=-1) :].tolist()
            cut = '"' in TOKENIZER.decode(ids)
            how = "string" if cut else "id" if ids[-1] == EOS else "length"
            ids = ids[:-1] if ids[-1] == EOS else ids
            whole = TOKENIZER.hf.decode(ids, skip_special_tokens=not keep, clean_up_tokenization_spaces=False)
            assert text == whole.split('"')[0]
            ended.setdefault(how, []).append("<" in text)
        assert {"string", "id"} <= set(ended)
    assert "length" in ended
    # Each kind of end has special tokens in its texts, or none has.
    assert all(any(seen) == keep for seen in ended.values())


def test_answers_that_the_template_does_not_show_are_refused(multi_turn, tmp_path, caplog):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    data = DataConfig(chat_template=str(tmp_path / "t.jinja"))
    said = "data.chat_template: the chat template leaves out message 2 of the role tool"
    with pytest.raises(ConfigError, match=said):
        MultiTurn(EnvironmentConfig(name="calculator", workers=0), Renderer(data, TOKENIZER), TOKENIZER)
    parts = multi_turn(data=data)
    assert said in caplog.text
    episodes = Episodes(parts)
    episodes.begin(0, request_of(make_prompts(parts, "a")))
    episodes.turn_ended(0, turn_of([9, EOS]), stopped=True, text="", overshoot=0)
    with pytest.raises(ConfigError, match=said):
        list(episodes.poll(block=True))


def test_a_stop_id_that_ends_no_turn_of_the_template_is_part_of_what_was_said(model, multi_turn):
    """The end of a call, say: the environment reads it, rewards do not, and the row goes on."""
    (bang,) = TOKENIZER.encode("!")
    parts = multi_turn(turns=3)
    out = play(model, parts, make_engine(model[0], stop_ids=(EOS, bang)))
    said = [m["content"] for e in out.episodes for m in e.messages if m["role"] == "assistant"]
    assert any(text.endswith("!") for text in said) and not any("!" in text[:-1] for text in said)
    assert not any("!" in text for text in out.texts)
    for s in out.samples:
        (row,) = s.rows
        whole = TOKENIZER.render(s.episode.messages, add_generation_prompt=False)
        assert whole.startswith(TOKENIZER.decode([*row.prompt, *row.tokens]))
    assert_trainer_agrees(model, out)


def test_limits(model, multi_turn):
    parts = multi_turn(turns=2, turn_tokens=12, observation_tokens=2, args={"room": 9})
    out = play(model, parts, limit=50)
    assert {"turns", "length"} <= {s.stop_reason for s in out.samples}
    for s in out.samples:
        episode = s.episode
        assert episode.turns <= 2 and len(s.tokens) <= 50
        turns = [m for m in episode.messages if m["role"] == "assistant"]
        assert all(len(TOKENIZER.encode(m["content"])) <= 12 for m in turns)
        assert all(len(m["content"]) <= 2 for m in episode.messages if m["role"] == "tool")
        assert s.truncated == (s.stop_reason != "stop")
    # A total that leaves no room for another turn ends the episode; nothing is written beyond it.
    out = play(model, multi_turn(turns=9), limit=30)
    reasons = {s.stop_reason for s in out.samples}
    assert out.lengths.max() <= 30 and "length" in reasons and "turns" not in reasons
    assert_trainer_agrees(model, out)


def test_a_bad_environment_costs_its_episode(model, multi_turn):
    names = ["a", "hang", "raise", "exit", "number", "nan", "message", "b"]
    parts = multi_turn("Rough", workers=2, timeout_seconds=4)
    pids = parts.pool.pids
    out = play(model, parts, prompts=make_prompts(parts, names), group=2)
    kinds = dict(hang="timeout", exit="crash", raise_="exception", number="type", nan="type", message="type")
    failed = {names[i // 2]: e.failure for i, e in enumerate(out.episodes) if e.failure}
    assert failed == {k: kinds[k + "_" * (k == "raise")] for k in failed} and len(failed) >= 4
    for i, episode in enumerate(out.episodes):
        if names[i // 2] in "ab":
            assert episode.failure is None
        elif episode.turns > 1 and out.samples[i].stop_reason != "length":
            assert out.samples[i].stop_reason == "error"
    assert set(parts.pool.pids) != set(pids)  # those that hung or ended were replaced
    assert_trainer_agrees(model, out)
    with pytest.raises(UserCodeError, match="no such thing"):
        parts = multi_turn("Rough", on_error="stop")
        play(model, parts, prompts=make_prompts(parts, ["raise"] * 5), group=2)


def test_nothing_compiles_after_the_first_call(model, multi_turn):
    play(model, multi_turn(turns=2), group=1)
    params = model[0].unstack(model[1])
    with CompilationCounter() as counter:
        parts = multi_turn(turns=6)
        play(model, parts, prompts=make_prompts(parts, "abcdefg"), group=3, params=params)
        assert counter.metrics()["compile/count"] == 0
