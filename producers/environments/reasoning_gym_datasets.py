"""Datasets of reasoning_gym by name, at a level of their curriculum, or composed; and how answers are scored."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from headrace.errors import EnvironmentLoadError
from headrace.objects import near
from producers.environments.options import misfit

COMPILED = "pycosat"
"""A C extension without wheels, which only the dataset zebra_puzzles calls."""
COMPOSITE = "composite"
EVERY = "*"
"""In a curriculum's table: all attributes that are not named."""
PARTS = frozenset({"name", "weight", "curriculum", "options"})
"""What the table of one part of a composite dataset says."""
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, SyntaxError)
"""What datasets raise at answers that are not of their form."""

Level = int | Mapping[str, int]
"""Of all attributes, the highest there is where one has fewer levels; or of each by name."""


def make_dataset(
    name: str, *, curriculum: Level | None = None, parts: Sequence[Mapping[str, Any]] = (), **options: Any
) -> Any:
    """A dataset of the package; `options` count before what the curriculum says. Raises EnvironmentLoadError."""
    gym = import_package()
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        meant = near(name, known) or f": {', '.join(sorted(known))}"
        raise EnvironmentLoadError(f"reasoning_gym: dataset = {name!r} is not one of its {len(known)} datasets{meant}")
    if name == "zebra_puzzles" and not hasattr(sys.modules[COMPILED], "itersolve"):
        raise EnvironmentLoadError(f"reasoning_gym: dataset = {name!r} needs {COMPILED}: pip install {COMPILED}")
    if parts:
        options = {**options, "datasets": _specs(name, parts)}
    if curriculum is not None:
        options = {**_at_level(name, curriculum), **options}
    try:
        return gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        why = misfit(known[name][1], options) or f": {error}"
        raise EnvironmentLoadError(f"reasoning_gym: dataset {name!r} refuses its options{why}") from error


def score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """What the dataset says of an answer; 0 for one that it cannot read.

    Raises what the dataset raises when it cannot read its own answer either: then it is not the model's fault.
    """
    name = entry["metadata"].get("source_dataset", "")
    if name in JUDGED_HERE:
        return JUDGED_HERE[name](answer, entry)
    try:
        return float(dataset.score_answer(answer, entry))
    except UNREADABLE:
        dataset.score_answer(entry["answer"] or "", entry)
        return 0.0


def import_package() -> ModuleType:
    """The package, also where its compiled requirement is missing. Raises EnvironmentLoadError without the package."""
    try:
        importlib.import_module(COMPILED)
    except ImportError:
        # Without a C compiler it cannot be installed. An empty module lets everything that does not call it import.
        sys.modules[COMPILED] = ModuleType(COMPILED)
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise EnvironmentLoadError(
            f"environment 'reasoning_gym' needs a package that is not there ({error}): "
            f"pip install 'headrace[reasoning-gym]'"
        ) from error


def _at_level(name: str, level: Level) -> dict[str, Any]:
    """The options that a dataset has at this level of its curriculum."""
    factory = importlib.import_module("reasoning_gym.factory")
    if not factory.has_curriculum(name):
        raise EnvironmentLoadError(f"reasoning_gym: dataset {name!r} has no curriculum")
    curriculum = factory.create_curriculum(name)
    given = {EVERY: level} if isinstance(level, int) else dict(level)
    unknown = set(given) - {EVERY, *curriculum.attributes}
    if unknown:
        raise EnvironmentLoadError(
            f"reasoning_gym: the curriculum of {name!r} has no attribute {', '.join(sorted(unknown))}, "
            f"only {', '.join(curriculum.attributes)}"
        )
    for value in given.values():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise EnvironmentLoadError(f"reasoning_gym: curriculum = {level!r}: a level is a number from 0")
    try:
        if EVERY in given:
            curriculum.set_global_level(given.pop(EVERY))
        for attribute, value in given.items():
            curriculum.set_attr_level(attribute, value)
        made = curriculum.generate_configuration()
    except (TypeError, ValueError, AssertionError) as error:
        raise EnvironmentLoadError(f"reasoning_gym: dataset {name!r} has no such level: {error}") from error
    options = {field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.init}
    return {key: value for key, value in options.items() if key not in ("seed", "size")}


def _specs(name: str, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What the package's composite dataset takes."""
    if name != COMPOSITE:
        raise EnvironmentLoadError(f"reasoning_gym: datasets belong to dataset = {COMPOSITE!r}, not to {name!r}")
    spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
    made = []
    for part in parts:
        if not isinstance(part, Mapping) or "name" not in part or not set(part) <= PARTS:
            raise EnvironmentLoadError(
                f"reasoning_gym: datasets has {part!r}; a part has a name, and may have {', '.join(sorted(PARTS))}"
            )
        options = dict(part.get("options", {}))
        if "curriculum" in part:
            options = {**_at_level(part["name"], part["curriculum"]), **options}
        made.append(spec(part["name"], part.get("weight", 1.0), options))
    return made


def _as_written(answer: str, entry: Mapping[str, Any]) -> float:
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


JUDGED_HERE = {"game_of_life_halting": _as_written}
"""Datasets whose own judgement is no use: this one takes any text at all for the right answer."""
