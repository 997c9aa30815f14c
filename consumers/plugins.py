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
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(f"{key} = {name!r}: module {module_name} does not import: {error}") from error
    except AttributeError:
        raise ConfigError(f"{key} = {name!r}: module {module_name} has no {attribute!r}") from None
    if not callable(found):
        raise ConfigError(f"{key} = {name!r} is not a function")
    return found
