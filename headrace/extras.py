"""Packages that only some installations have."""

from __future__ import annotations

from importlib.util import find_spec

from headrace.errors import ServiceError


def needs_train(what: str, *packages: str) -> None:
    """Raises ServiceError where one of these packages of the extra `train` is missing; `what` needs them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ServiceError(
            f"{what} needs {' and '.join(missing)}, which this installation has not; do it where the trainer or a "
            "producer runs, or pip install 'headrace[train]'"
        )
