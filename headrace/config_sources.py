"""Where configuration comes from: TOML file < environment < command line, each value with its origin."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.config import Config
from headrace.errors import ConfigError, Refused
from headrace.objects import near

PREFIX = "HEADRACE__"
"""`HEADRACE__TRAINER__LEARNING_RATE=3e-6` sets `trainer.learning_rate`."""

_LONGEST_QUOTE = 200


@dataclass(frozen=True, slots=True)
class Resolved:
    config: Config
    origins: dict[str, str]
    """Dotted key to where its value came from; keys that are absent have their default."""


def resolve(file: Path | None, environ: Mapping[str, str], overrides: Iterable[str]) -> Resolved:
    """Merge all sources and validate. `overrides` are `key=value` strings of the command line.

    Raises ConfigError with one sentence that names the key, the value and where it came from.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in _file_items(file) if file else ():
        _put(tree, origins, key, value, str(file))
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX):
            key = name[len(PREFIX) :].lower().replace("__", ".")
            _put(tree, origins, key, scalar(_readable(text, f"${name}")), f"${name}")
    for item in overrides:
        _readable(item, "--set")
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {item!r} is not of the form key=value, as in trainer.learning_rate=1e-5")
        _put(tree, origins, key, scalar(text), "command line")
    try:
        return Resolved(Config.model_validate(tree), origins)
    except ValidationError as error:
        raise ConfigError(_sentence(error, origins)) from None


def validated(tree: Mapping[str, Any]) -> Config:
    """A whole tree, some of whose values a command has set. Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_sentence(error, {})) from None


def stored(tree: Mapping[str, Any]) -> Config:
    """The configuration that a run's record holds. Raises Refused for one that this release does not know."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise Refused(
            f"the run was created by a release with another configuration: {_sentence(error, {})}; "
            "start every service of a run with the same release"
        ) from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping as (dotted key, value); lists and empty mappings are leaves."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def known_keys() -> list[str]:
    """All dotted keys, sections among them."""
    tree = Config().model_dump()
    return [*tree, *(key for key, _ in flatten(tree))]


def _file_items(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:
        raise ConfigError(f"config file {str(file)!r} cannot be read: {error}") from error
    try:
        # With the mark that editors of Windows set before UTF-8.
        tree = _parsed(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}") from error
    yield from flatten(tree)


def _readable(text: str, where: str) -> str:
    """The text itself. Raises ConfigError for one that was given in bytes that are not UTF-8."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{where} {_shown(text)} is not UTF-8; give it in UTF-8")
    return text


def scalar(text: str) -> Any:
    """A value as TOML would read it; anything that is not TOML is a plain string."""
    try:
        parsed = _parsed(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break in the text must not smuggle in more than one value.
    return parsed["value"] if len(parsed) == 1 else text


def _parsed(text: str) -> dict[str, Any]:
    """Raises ValueError for what is not TOML, or has an integer of thousands of digits; RecursionError for brackets."""
    tree = tomllib.loads(text)
    # A hexadecimal one is read, and then neither shown nor written into a record.
    repr(tree)
    return tree


def _put(tree: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key} (from {origin}): {parent} is a value, not a section")
        node = child
    node[leaf] = value
    origins[key] = origin


def _related(known: str, key: str) -> bool:
    """One is the other, or stands below it."""
    return known == key or key.startswith(f"{known}.") or known.startswith(f"{key}.")


def _sentence(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    origin = next((origins[known] for known in origins if _related(known, key)), None)
    where = f" (from {origin})" if origin else ""
    if first["type"] == "extra_forbidden":
        meant = near(key, known_keys())
        return f"{key}{where} is not a known configuration key{meant}; `headrace config` lists all keys"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not key:
        return message
    return f"{key} = {_shown(first['input'])}{where}: {message[0].lower()}{message[1:]}"


def _shown(value: object) -> str:
    """A value as it is quoted in a sentence; a long one without its middle."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE // 2]}…{text[-_LONGEST_QUOTE // 2 :]}"
