"""Environments: what answers the policy between its turns. One file a built-in.

To add one, write ``jaxrl/environments/<name>.py`` with a class ``Environment``, and its test; ``calls.py``
says what it has to offer. A user's own needs no file here: ``environment.name`` takes an import path
(``my_pkg.games:Chess``) or a file (``games.py:Chess``).
"""

from jaxrl.environments.calls import Step
from jaxrl.environments.config import EnvironmentConfig

__all__ = ["EnvironmentConfig", "Step"]
