"""Learning: the learner's programs, and the optimizer."""
