"""Named algorithms: plain dictionaries of ``Grpo`` keys. What a preset leaves out keeps the default.

A preset holds what makes the method, not the scale of the paper's run: learning rate, batch and group
sizes, and the coefficient of an optional KL penalty depend on the task and keep the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_SYMMETRIC_CLIP = {"clip_low": 0.2, "clip_high": 0.2}  # Schulman et al. 2017 (arXiv:1707.06347)

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Group-relative advantages (arXiv:2402.03300) as they are run today: token mean, higher upper clip,
        # no KL.
        "grpo": {},
        # DeepSeekMath (arXiv:2402.03300), eq. 3 and 4, section 4.2: mean over sequences, 0.04 x k3 in the
        # loss.
        "grpo_paper": {
            **_SYMMETRIC_CLIP,
            "aggregation": "sequence_mean",
            "kl_coef": 0.04,
            "kl_in": "loss",
            "kl_estimator": "k3",
            "sampler_correction": "none",
        },
        # Dr. GRPO (arXiv:2503.20783), section 3: no division by the group's deviation nor the length.
        "dr_grpo": {**_SYMMETRIC_CLIP, "advantage_std": "none", "aggregation": "constant"},
        # DAPO (arXiv:2503.14476), section 3: clip-higher, dynamic sampling, token mean, overlong punishment.
        "dapo": {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "dynamic_sampling": True,
            "overlong_penalty": 1.0,
        },
        # GSPO (arXiv:2507.18071), eq. 5 and 7, section 5.1: ratio of sequences, hence far tighter bounds.
        # The ratio matters from the second update on; the paper makes four (num_minibatches: 4).
        "gspo": {
            "ratio_level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence_mean",
            "sampler_level": "sequence",
        },
        # CISPO, MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5: no lower bound; the upper one is from ScaleRL
        # (arXiv:2510.13786), as MiniMax names none.
        "cispo": {"objective": "cispo", "cispo_low": 0.0, "cispo_high": 5.0, "aggregation": "token_mean"},
        # RLOO (arXiv:2402.14740): the completion is one action, so ratio and loss are of whole
        # sequences; a KL penalty (kl_coef) goes into the reward.
        "rloo": {
            **_SYMMETRIC_CLIP,
            "advantage": "leave_one_out",
            "advantage_std": "none",
            "ratio_level": "sequence_sum",
            "aggregation": "sequence_mean",
            "sampler_level": "sequence",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        # REINFORCE++ (arXiv:2501.03262): no group baseline, advantages normalised over the whole batch; a KL
        # penalty (kl_coef) goes into the reward. Each token gets the KL of its whole sequence; the paper sums
        # it from the token on, which has the same mean before the normalisation and less variance.
        "reinforce_pp": {
            **_SYMMETRIC_CLIP,
            "advantage": "none",
            "advantage_std": "none",
            "whiten": "token",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        # Its variant "with baseline": group mean first, then the same normalisation; k2 in the loss.
        "reinforce_pp_baseline": {
            **_SYMMETRIC_CLIP,
            "advantage": "group_mean",
            "advantage_std": "none",
            "whiten": "token",
            "kl_in": "loss",
            "kl_estimator": "k2",
        },
    }
)
