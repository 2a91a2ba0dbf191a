"""Rewards: one file a reward, and the pool that runs them.

To add a built-in reward, write ``jaxrl/rewards/<name>.py`` with a function of the same name, and its test;
``functions.py`` says how it is called and which hooks its file may have. A user's own function needs no file
here: a term names it by import path (``my_pkg.rewards:brevity``) or file (``rewards.py:brevity``).
"""

from jaxrl.rewards.config import RewardsConfig, RewardTerm
from jaxrl.rewards.pool import RewardPool, Scores

__all__ = ["RewardPool", "RewardTerm", "RewardsConfig", "Scores"]
