"""``python -m jaxrl.plan``: compile every program of a run for a TPU topology that is not there, and
tell whether it fits, and how long it takes."""
