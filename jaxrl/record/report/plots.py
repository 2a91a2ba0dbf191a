"""Which plots a report has: one table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from jaxrl.record.report.run import Curves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot. ``lines``: patterns of metric names, each with the label of its line."""

    key: str
    title: str
    lines: tuple[tuple[str, str], ...]
    section: str
    unit: str = ""
    kind: Literal["lines", "stack", "phases", "events"] = "lines"
    scale: Literal["linear", "log"] = "linear"
    form: Literal["number", "percent", "bytes", "count"] = "number"
    floor: bool = False
    """The axis starts at 0."""
    exact: bool = False
    """No moving average."""
    spread: str = ""
    """Metric of the standard deviation drawn as a band around the first line."""
    note: str = ""
    """Advice on reading the plot, one sentence."""

    def find(self, runs: Sequence[Curves]) -> list[tuple[str, str]]:
        """(metric, label) of every line that at least one of the runs has, in the order of ``lines``."""
        names = sorted({name for run in runs for name in run.values if run.get(name)[0].size})
        found = {}
        for pattern, label in self.lines:
            for name in names:
                if (match := re.fullmatch(pattern, name)) and name not in found:
                    found[name] = label.format(*match.groups())
        return list(found.items())


LEARNING, POLICY, MACHINE, CHECKS = "Learning", "Policy and optimizer", "Time and memory", "Checks"

PLOTS: tuple[Plot, ...] = (
    Plot(
        key="reward",
        title="Reward",
        section=LEARNING,
        lines=((r"reward/mean", "train"), (r"eval/reward_mean", "held-out")),
        spread="reward/std",
        note="Mean over the completions of a step; the band is one standard deviation.",
    ),
    Plot(
        key="pass_at_1",
        title="Pass@1",
        section=LEARNING,
        form="percent",
        floor=True,
        lines=((r"rollout/pass_at_1", "train"), (r"eval/pass_at_1", "held-out")),
        note="Share of single attempts that solve the task.",
    ),
    Plot(
        key="eval",
        title="Held-out, several attempts",
        section=LEARNING,
        form="percent",
        floor=True,
        lines=((r"eval/pass_at_(?!1$)(\w+)", "pass@{0}"), (r"eval/maj_at_(\w+)", "maj@{0}")),
        note="pass@k: one of k attempts is right. maj@k: the most common answer of k is right.",
    ),
    Plot(
        key="terms",
        title="Reward by term",
        section=LEARNING,
        lines=((r"reward/(?!mean$|std$|errors$|\w+_fraction$)(.+)", "{0}"),),
        note="Each reward function before its weight.",
    ),
    Plot(
        key="length",
        title="Completion length",
        section=LEARNING,
        unit="tokens",
        floor=True,
        lines=((r"rollout/length_mean", "train"), (r"eval/length_mean", "held-out")),
        note="Length that grows without reward is a warning.",
    ),
    Plot(
        key="truncated",
        title="Truncated completions",
        section=LEARNING,
        form="percent",
        floor=True,
        lines=((r"rollout/truncated_fraction", "train"), (r"eval/truncated_fraction", "held-out")),
        note="Cut by the token limit; they often earn nothing whatever they say.",
    ),
    Plot(
        key="entropy",
        title="Entropy",
        section=POLICY,
        unit="nats per token",
        lines=((r"algo/entropy", "policy"),),
        note="A fall to zero ends exploration.",
    ),
    Plot(
        key="kl",
        title="KL divergence",
        section=POLICY,
        unit="nats per token",
        lines=((r"algo/kl", "reference"), (r"algo/kl_old", "old policy"), (r"sampler/kl", "sampler")),
        note="From the frozen reference, from the policy before the update, from the sampler.",
    ),
    Plot(
        key="clip",
        title="Clipped tokens",
        section=POLICY,
        form="percent",
        floor=True,
        lines=(
            (r"algo/clip_fraction", "all"),
            (r"algo/clip_(low|high)_fraction", "{0}"),
            (r"sampler/clipped_fraction", "sampler weight"),
        ),
        note="Tokens whose ratio left the clip range and got no gradient.",
    ),
    Plot(
        key="sampler",
        title="Sampler against trainer",
        section=CHECKS,
        unit="nats",
        scale="log",
        lines=((r"sampler/log_prob_diff_mean", "mean"), (r"sampler/log_prob_diff_max", "max")),
        note="|log-prob of the sampler - log-prob of the trainer| for the same token and weights.",
    ),
    Plot(
        key="ratio",
        title="Probability ratio",
        section=POLICY,
        scale="log",
        lines=((r"algo/ratio_mean", "mean"), (r"algo/ratio_(?!mean$)(.+)", "{0}")),
        note="New over old probability of the sampled tokens; 1 means unchanged.",
    ),
    Plot(
        key="zero_spread",
        title="Groups without a signal",
        section=POLICY,
        form="percent",
        floor=True,
        lines=((r"algo/zero_spread_fraction", "equal rewards"),),
        note="All completions of the prompt earned the same: nothing to learn from it.",
    ),
    Plot(key="loss", title="Loss", section=POLICY, lines=((r"loss/(.+)", "{0}"),)),
    Plot(
        key="grad_norm",
        title="Gradient norm",
        section=POLICY,
        lines=((r"optim/grad_norm", "before clipping"),),
    ),
    Plot(
        key="learning_rate",
        title="Learning rate",
        section=POLICY,
        exact=True,
        floor=True,
        lines=((r"optim/learning_rate", "learning rate"),),
    ),
    Plot(
        key="skipped",
        title="Skipped updates",
        section=CHECKS,
        form="count",
        kind="events",
        lines=((r"optim/skipped", "skipped"),),
        note="Updates left out: a gradient was not finite, or no token had a weight.",
    ),
    Plot(
        key="seconds",
        title="Seconds by phase",
        section=MACHINE,
        unit="seconds",
        kind="stack",
        floor=True,
        lines=((r"time/(?!step_)(\w+)_seconds", "{0}"),),
    ),
    Plot(
        key="throughput",
        title="Throughput by phase",
        section=MACHINE,
        unit="tokens per second",
        form="count",
        kind="phases",
        floor=True,
        lines=((r"throughput/(\w+)_tokens_per_second", "{0}"),),
    ),
    Plot(
        key="memory",
        title="Memory",
        section=MACHINE,
        form="bytes",
        exact=True,
        floor=True,
        lines=(
            (r"memory/peak_bytes", "peak"),
            (r"memory/host_bytes", "host"),
            (r"memory/live_bytes", "arrays"),
        ),
        note="Peak of a device (of the process on CPU), host memory, and arrays alive after the step.",
    ),
    Plot(
        key="errors",
        title="Reward failures",
        section=CHECKS,
        form="count",
        kind="events",
        lines=((r"reward/errors", "failures"),),
        note="Calls of reward functions that raised, hung or returned nonsense.",
    ),
    Plot(
        key="compile",
        title="Compilations",
        section=CHECKS,
        form="count",
        kind="events",
        lines=((r"compile/count", "programs"),),
        note="After warm-up there should be none.",
    ),
)

OVERVIEW = (
    "reward pass_at_1 length truncated entropy kl clip sampler grad_norm seconds throughput memory".split()
)
"""Plots of the picture, by key."""

PHASES = "rollout update statistics rewards refresh prompts eval checkpoint".split()
"""Order of known phases in a stack, from the bottom; it also fixes their colours."""
