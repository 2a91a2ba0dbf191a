"""How parameters learn: the learner's programs, and the optimizer."""
