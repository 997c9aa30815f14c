"""Engines by name. Each is imported only when it is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.objects import load_function
from producers.engines.api import Engine
from producers.engines.stops import Decode

Factory = Callable[[Config, Path, int], Engine]


def build_engine(name: str, config: Config, model_folder: Path, seed: int) -> Engine:
    """The engine `name`: one of `ENGINES`, or `package.module:object`, a callable of (config, model_folder, seed).

    Raises ConfigError for a name that is not found or options that the engine does not know.
    """
    try:
        return engine_factory(name)(config, model_folder, seed)
    except TypeError as error:
        options = ", ".join(config.producer.engine_options) or "none"
        raise ConfigError(
            f"producer.engine = {name!r} cannot be built with producer.engine_options = {options}: {error}"
        ) from error


def engine_factory(name: str) -> Factory:
    """What builds the engine `name`. Raises ConfigError for a name that is not found."""
    return ENGINES[name] if name in ENGINES else _user_factory(name)


def _scripted(config: Config, model_folder: Path, seed: int) -> Engine:
    from producers.engines.scripted import ScriptedEngine

    return ScriptedEngine(
        slots=config.producer.slots,
        context_length=config.model.context_length,
        seed=seed,
        **config.producer.engine_options,
    )


def _torch(config: Config, model_folder: Path, seed: int) -> Engine:
    from headrace.policy.loading import load_tokenizer
    from producers.engines.torch_engine import TorchEngine

    tokenizer = load_tokenizer(model_folder)
    return TorchEngine(
        model_folder,
        slots=config.producer.slots,
        context_length=config.model.context_length,
        dtype=config.model.dtype,
        device=config.model.device,
        threads=config.producer.threads,
        seed=seed,
        decode=lambda token_ids: str(tokenizer.decode(token_ids)),
        **config.producer.engine_options,
    )


def _sglang(config: Config, model_folder: Path, seed: int) -> Engine:
    from producers.engines.remote.options import parsed
    from producers.engines.sglang.engine import SglangEngine
    from producers.engines.sglang.options import Options
    from producers.engines.sglang.probing import sampling_fault

    sampling = config.sampling
    if fault := sampling_fault(sampling.temperature, sampling.top_p, sampling.top_k):
        raise ConfigError(fault)

    return SglangEngine(
        model_folder,
        parsed(Options, config.producer.engine_options),
        slots=config.producer.slots,
        context_length=config.model.context_length,
        dtype=config.model.dtype,
        seed=seed,
        decode=_decode(model_folder),
    )


def _openai(config: Config, model_folder: Path, seed: int) -> Engine:
    from producers.engines.api import SamplingParams
    from producers.engines.openai.engine import OpenAIEngine
    from producers.engines.openai.options import Options
    from producers.engines.remote.options import parsed

    sampling = config.sampling
    return OpenAIEngine(
        model_folder,
        parsed(Options, config.producer.engine_options),
        slots=config.producer.slots,
        context_length=config.model.context_length,
        seed=seed,
        sampling=SamplingParams(1, sampling.temperature, sampling.top_p, sampling.top_k),
        decode=_decode(model_folder),
    )


def _decode(model_folder: Path) -> Decode:
    """Only stop strings that begin in one request to a server and end in the next need the tokenizer."""

    @cache
    def tokenizer() -> Any:
        from headrace.policy.loading import load_tokenizer

        return load_tokenizer(model_folder)

    return lambda token_ids: str(tokenizer().decode(token_ids))


ENGINES: dict[str, Factory] = {"openai": _openai, "scripted": _scripted, "sglang": _sglang, "torch": _torch}


def _user_factory(name: str) -> Factory:
    if ":" not in name:
        known = ", ".join(sorted(ENGINES))
        raise ConfigError(f"producer.engine = {name!r} is not one of {known}, nor of the form package.module:object")
    factory: Factory = load_function(name, f"producer.engine = {name!r}", ConfigError)
    return factory
