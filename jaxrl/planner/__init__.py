"""``python -m jaxrl.plan``: compile every program of a run for a TPU topology without having it, and
tell whether it fits, and how long it takes."""
