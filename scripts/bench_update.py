"""Time of one GRPO update on this machine, as a table and JSON.

    python scripts/bench_update.py --model models/SmolLM2-135M-Instruct
    python scripts/bench_update.py --model ... --peers DIR --peer-python ENV/bin/python

The work is 4 prompts x 4 completions of exactly 64 + 128 tokens, float32, all parameters trained, KL 0.04 to
a reference model, AdamW. FLOPs are those that the work needs at least: each prompt once for its group, the
output head at completion tokens only, three times the forward pass, and no attention to what is masked.

``--peers`` is a folder with ``peer_trl.py`` and ``peer_tunix.py``, which do the same work and append a JSON
line with the seconds of their ``update`` and ``ref`` phases to the file named by PEER_OUT. They run between
runs of our own, in the Python of ``--peer-python``. Figures count only on a machine that does nothing
else: ``other_cores`` says how many cores other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

from jaxrl.config import from_dict
from jaxrl.learn.optimizer import Hyper
from jaxrl.learn.packing import Sequence, pack
from jaxrl.mesh.sharding import put
from jaxrl.models import ModelConfig
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Setup, set_up

PROMPTS, GROUP, PROMPT, COMPLETION = 4, 4, 64, 128
PEERS = {
    "TRL": ["peer_trl.py", "--micro", "4"],
    "Tunix": ["peer_tunix.py", "--micro", "1", "--maxprompt", str(PROMPT)],
}
"""Each with the micro-batch and padding that are its best on CPUs."""


def config_of(model: str, micro_batch_tokens: int) -> RunConfig:
    """The run whose update this is."""
    return from_dict(
        RunConfig,
        {
            "steps": 1,
            "model": {"path": model, "compute_dtype": "float32", "remat": "none"},
            "data": {"source": "arithmetic", "max_prompt_tokens": PROMPT, "prompts_per_step": PROMPTS},
            "rollout": {"group_size": GROUP, "max_new_tokens": COMPLETION},
            "rewards": {"terms": [{"name": "arithmetic"}]},
            "algo": {"kl_coef": 0.04},
            "batch": {"micro_batch_tokens": micro_batch_tokens},
        },
    )


def sequences(vocabulary: int) -> list[Sequence]:
    """Random tokens: what they say does not change the time."""
    random = np.random.default_rng(0)
    mask = np.repeat(np.array([0, 1], np.float32), [PROMPT, COMPLETION])
    found = []
    for group in range(PROMPTS):
        prompt = random.integers(0, vocabulary, PROMPT)
        for _ in range(GROUP):
            tokens = np.concatenate([prompt, random.integers(0, vocabulary, COMPLETION)]).astype(np.int32)
            found.append(
                Sequence(
                    tokens=tokens,
                    loss_mask=mask,
                    loss_weights=mask / (PROMPTS * GROUP * COMPLETION),
                    columns={
                        "advantages": mask * random.normal(),
                        "rollout_log_probs": -mask,
                        "ref_log_probs": -mask,
                    },
                    group=group,
                    prompt_tokens=PROMPT,
                )
            )
    return found


def forward_flops(config: ModelConfig) -> float:
    """FLOPs of the forward pass over what has to be computed."""
    d, heads, kv, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    layer = d * h * (2 * heads + 2 * kv) + 3 * d * config.intermediate_size
    tokens = PROMPTS * (PROMPT + GROUP * COMPLETION)
    seen = PROMPT * (PROMPT + 1) / 2 + GROUP * sum(PROMPT + i + 1 for i in range(COMPLETION))
    attention = 4 * PROMPTS * seen * heads * h
    head = 2 * PROMPTS * GROUP * COMPLETION * d * config.vocab_size
    return config.num_layers * (2 * tokens * layer + attention) + head


def peak_flops(seconds: float = 1.0) -> float:
    """FLOP/s of the best large float32 matrix product."""
    best = 0.0
    for m, k, n in ((2048, 2048, 2048), (4096, 576, 1536), (1024, 1536, 576)):
        a, b, f = jnp.ones((m, k)), jnp.ones((k, n)), jax.jit(jnp.matmul)
        f(a, b).block_until_ready()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            f(a, b).block_until_ready()
            best = max(best, 2 * m * k * n / (time.perf_counter() - start))
    return best


class Programs:
    """The programs of a run, ready to be timed."""

    def __init__(self, parts: Setup):
        self.parts, self.programs = parts, parts.programs(1)
        mesh, self.learner = parts.mesh, self.programs.learner
        self.hyper = Hyper.of(parts.config.optim, parts.config.optim.learning_rate)
        self.state = self.learner.init_state(parts.initial_params())
        batch, count, _ = pack(sequences(parts.vocab_limit), parts.batch_shape, self.learner.loss.columns)
        self.batch = put(batch, mesh, PartitionSpec(None, BATCH_AXES))
        self.count, self.none = (put(np.int32(n), mesh) for n in (count, 0))
        for part in (self.forward, self.optimize, self.update):
            part()  # compiles

    def forward(self) -> None:
        """The forward pass, and the log-probs of the reference."""
        jax.block_until_ready(self.learner.forward(self.state.params, {}, self.batch, self.count))

    def optimize(self) -> None:
        """AdamW alone: an update of no micro-batch."""
        self._update(self.none)

    def update(self) -> None:
        """Forward, backward and AdamW."""
        self._update(self.count)

    def _update(self, count: jax.Array) -> None:
        found = self.learner.update(self.state, {}, self.batch, count, self.hyper)
        self.state, _ = jax.block_until_ready(found)

    def measure(self, steps: int) -> list[dict[str, float]]:
        return [
            {name: value for part in ("forward", "optimize", "update") for name, value in self._timed(part)}
            for _ in range(steps)
        ]

    def _timed(self, part: str) -> list[tuple[str, float]]:
        run: Callable[[], None] = getattr(self, part)
        busy, own, start = _busy_seconds(), sum(os.times()[:2]), time.perf_counter()
        run()
        wall, cpu = time.perf_counter() - start, sum(os.times()[:2]) - own
        others = max(0.0, _busy_seconds() - busy - cpu) / wall
        return [(f"{part}_seconds", wall), (f"{part}_cpu_seconds", cpu), (f"{part}_other_cores", others)]


def _busy_seconds() -> float:
    """Processor seconds that all processes have used."""
    user, nice, system, _, _, irq, soft, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, soft))) / os.sysconf("SC_CLK_TCK")


def peer(name: str, folder: Path, python: str, model: str, steps: int) -> dict[str, float]:
    """Median seconds of a peer's phases: of its quiet steps where it had any."""
    script, *options = PEERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.jsonl"
        env = {**os.environ, "PEER_MODEL": str(Path(model).resolve()), "PEER_OUT": str(out)}
        env |= {"OUT_DIR": scratch}
        env.pop("PYTHONPATH", None)
        subprocess.run([python, script, "--steps", str(steps), *options], cwd=folder, env=env, check=True)
        found = json.loads(out.read_text().splitlines()[-1])["summary"]
    return {
        f"{ours}_seconds": (found[theirs]["quiet"] or found[theirs]["all"])[1]
        for ours, theirs in (("update", "update"), ("forward", "ref"))
    }


def report(results: dict[str, Any]) -> None:
    """The table."""
    table = Table("", "update s", "reference s", "tokens/s of the update", "GFLOP/s", "share of peak")
    tokens = PROMPTS * GROUP * (PROMPT + COMPLETION)
    for name in ("jaxrl", *PEERS):
        if name not in results:
            continue
        update, forward = (results[name][f"{part}_seconds"] for part in ("update", "forward"))
        rate = results["update_flops"] / update
        share = f"{rate / results['peak_flops']:.0%}"
        table.add_row(
            name, f"{update:.2f}", f"{forward:.2f}", f"{tokens / update:.0f}", f"{rate / 1e9:.0f}", share
        )
    console = Console()
    console.print(table)
    own = results["jaxrl"]
    backward = own["update_seconds"] - own["forward_seconds"] - own["optimize_seconds"]
    console.print(
        f"jaxrl: forward {own['forward_seconds']:.2f} s, backward {backward:.2f} s, "
        f"AdamW {own['optimize_seconds']:.2f} s; {own['update_cpu_seconds']:.1f} processor seconds; "
        f"other processes used {own['update_other_cores']:.1f} cores"
    )
    console.print(
        f"at least {results['update_flops'] / 1e12:.2f} TFLOP; a large matrix product reaches "
        f"{results['peak_flops'] / 1e9:.0f} GFLOP/s"
    )
    if "ratio" in results:
        console.print(f"the faster peer takes {results['ratio']:.2f} times as long")


def ours(model: str, micro_batch_tokens: int, steps: int) -> dict[str, Any]:
    """The figures of jaxrl, and what this machine and this work are."""
    parts = set_up(config_of(model, micro_batch_tokens))
    programs = Programs(parts)
    peak = peak_flops()
    found = programs.measure(steps)
    return {
        "steps": found,
        "peak_flops": max(peak, peak_flops()),
        "update_flops": 3 * forward_flops(parts.model.config),
    }


def beside_peers(args: argparse.Namespace) -> dict[str, Any]:
    """``ours`` before, between and after the peers, each in a process of its own, so that none holds memory
    while another runs."""
    command = [sys.executable, __file__, "--model", args.model, "--steps", str(args.steps)]
    command += ["--micro-batch-tokens", str(args.micro_batch_tokens)]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "ours.json"
        runs = []
        for name in (None, *PEERS):
            if name:
                results[name] = peer(name, args.peers, args.peer_python, args.model, args.steps)
            subprocess.run([*command, "--json", out], check=True, stdout=subprocess.DEVNULL)
            runs.append(json.loads(out.read_text()))
    best = max(run["peak_flops"] for run in runs)
    steps = [step for run in runs for step in run["steps"]]
    return {**results, "steps": steps, "peak_flops": best, "update_flops": runs[0]["update_flops"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="Hugging Face folder")
    parser.add_argument("--steps", type=int, default=3, help="steps to take the median of")
    parser.add_argument("--micro-batch-tokens", type=int, default=PROMPT + GROUP * COMPLETION)
    parser.add_argument("--peers", type=Path, help="folder of peer_trl.py and peer_tunix.py")
    parser.add_argument("--peer-python", help="the Python that has trl and tunix")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if bool(args.peers) != bool(args.peer_python):
        parser.error("--peers and --peer-python need each other")
    results = beside_peers(args) if args.peers else ours(args.model, args.micro_batch_tokens, args.steps)
    steps = results["steps"]
    results["jaxrl"] = {name: statistics.median(s[name] for s in steps) for name in steps[0]}
    if args.peers:
        fastest = min(results[name]["update_seconds"] for name in PEERS)
        results["ratio"] = fastest / results["jaxrl"]["update_seconds"]
    report(results)
    print(json.dumps(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
