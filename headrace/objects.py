"""Objects that users name, as `package.module:object` or `path/to/file.py:object`, and what they raise in a line."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import HeadraceError


class _NotThere(Exception):
    """Its text is the reason."""


def load_object(spec: str, what: str, kind: type[HeadraceError], built_in: Iterable[str] = ()) -> Any:
    """The object that `spec` names. `what` begins the sentence: "environment 'x'", "trainer.loss = 'x'".

    `built_in` are names that it may have meant. Files are found from the working directory, as are modules.
    Raises `kind`.
    """
    place, colon, name = spec.rpartition(":")
    if not colon and spec.endswith(".py"):
        raise kind(f"{what} is a file; name an object of it, as in `{spec}:Mine`")
    if not colon or not place or not name:
        names = f" ({', '.join(sorted(built_in))})" if built_in else ""
        raise kind(
            f"{what} is not known{near(spec, built_in)}; use a built-in name{names}, `package.module:object` or "
            "`path/to/file.py:object`"
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    except _NotThere as error:
        raise kind(f"{what}: {error}") from error.__cause__
    found = getattr(module, name, None)
    if found is None:
        raise kind(f"{what}: {_named(place)} has no object {name!r}{_known(module)}")
    return found


def load_function(spec: str, what: str, kind: type[HeadraceError], built_in: Iterable[str] = ()) -> Any:
    """An object that can be called. Raises `kind`."""
    found = load_object(spec, what, kind, built_in)
    if not callable(found):
        raise kind(f"{what} is {type(found).__name__}, not a function")
    return found


def near(name: str, known: Iterable[str]) -> str:
    """For a sentence about a name that is not known: " (did you mean 'that'?)"; empty where none is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def reason(error: BaseException) -> str:
    """An exception in one bounded line that UTF-8 can hold: "ValueError: what it says"."""
    name = shortened(type(error).__name__)
    try:
        said = str(error)
    except Exception as other:  # noqa: BLE001 - a user's own __str__ raises what it likes
        said = f"(its text cannot be had: {type(other).__name__})"
    text = shortened(" ".join(said.split()))
    return (f"{name}: {text}" if text else name).encode("utf-8", "backslashreplace").decode()


def shortened(text: str) -> str:
    """At most the first 300 letters."""
    return text if len(text) <= 300 else f"{text[:300]}…"


def _from_package(name: str) -> ModuleType:
    _searchable(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _NotThere(f"{_named(name)} does not import ({reason(error)})") from error


def _from_file(file: Path) -> ModuleType:
    try:
        file = file.expanduser().resolve()
    except RuntimeError as error:
        # No such user, or links in a ring.
        raise _NotThere(f"file {file} cannot be found ({reason(error)})") from None
    # The name must be the same in every process, because answers of the file's own types are pickled by it.
    name = f"_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise _NotThere(f"file {file} does not exist; files are found from the folder where headrace is called")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise _NotThere(f"file {file} is not a Python file")
    _searchable(file.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _NotThere(f"file {file} does not import ({reason(error)})") from error
    return module


def _searchable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _named(place: str) -> str:
    return f"file {place}" if place.endswith(".py") else f"module {place}"


def _known(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return f", only {', '.join(names[:8])}" if names else ""
