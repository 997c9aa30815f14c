"""The user's own functions, named in the configuration as `package.module:object`."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.errors import ConfigError


def load_object(name: str, key: str) -> Any:
    """The object that `name` stands for; `key` is the configuration key it came from.

    Raises ConfigError when the module does not import or has no such callable.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # It is somebody's own code, which may raise anything.
        raise ConfigError(
            f"{key} = {name!r}: module {module_name} does not import: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"{key} = {name!r}: module {module_name} has no {attribute!r}")
    if not callable(found):
        raise ConfigError(f"{key} = {name!r} is not a function")
    return found
