"""Which configuration a command means that names an environment, an engine or a model by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.config_sources import resolve, scalar, validated
from headrace.errors import ConfigError

NO_TRAINER = ("trainer.group_size=1", "producer.min_group_size=1")
"""Sizes of groups that fit whatever else is asked for."""


def asked(
    file: Path | None,
    overrides: Sequence[str],
    environment: str | None,
    options: Sequence[str],
    **named: str | None,
) -> Config:
    """As a run would have it, but of one environment where one is named: by its label or name in the file, or anew.

    `named` are values by their keys, with a double underscore for the dot. Raises ConfigError.
    """
    texts = [f"{key.replace('__', '.')}={json.dumps(text)}" for key, text in named.items() if text is not None]
    config = resolve(file, os.environ, [*overrides, *texts, *NO_TRAINER]).config
    entries = list(config.environments)
    if environment is not None:
        entries = [entry for entry in entries if environment in (entry.called, entry.name)][:1]
    if options and len(entries) > 1:
        names = ", ".join(entry.called for entry in entries)
        raise ConfigError(f"--option is for one environment, and there are several ({names}); name one")
    given = dict(map(_option, options))
    trees = [entry.model_dump() for entry in entries] or [{"name": environment}]
    tree = config.model_dump()
    # What only a trainer needs must not be in the way.
    tree["environments"] = [
        {**one, "options": {**one.get("options", {}), **given}, "weight": 1.0, "min_share": 0.0} for one in trees
    ]
    tree["evaluation"]["environment"] = ()
    return validated(tree)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--option {text!r} is not of the form key=value, as in digits=2")
    return name, scalar(value)
