"""`producer.engine_options` of engine "sglang": what is refused, and how it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config
from headrace.errors import ConfigError
from producers.engines.registry import build_engine
from producers.engines.remote.options import parsed
from producers.engines.sglang.engine import SglangEngine
from producers.engines.sglang.options import Options, server_flags
from tests.tiny import save_tiny_llama


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "either urls or launch must be set"),
        ({"urls": ["http://a:1"], "launch": 1}, "only one of them"),
        ({"urls": ["http://a:1", "http://a:1"]}, "a server stands twice"),
        ({"urls": ["http://a:1", "http://a:1/"]}, "a server stands twice"),
        ({"urls": ["a:1"]}, r"producer.engine_options.urls.0 = 'a:1': a server is named as http://host:port"),
        ({"urls": ["http://a:1/v1"]}, "urls.0 = .*without a path"),
        ({"urls": ["http://me:secret@a:1"]}, "urls.0 = .*a user or a password"),
        ({"launch": 1, "kv": "drop"}, "producer.engine_options.kv = 'drop'"),
        ({"launch": 1, "speed": 9}, "producer.engine_options.speed: "),
        ({"launch": 1, "admin_key": "secret"}, "producer.engine_options.admin_key: Extra"),
        ({"launch": -1}, "producer.engine_options.launch = -1"),
    ],
)
def test_an_option_that_cannot_be_is_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parsed(Options, given)


def test_each_server_may_have_arguments_of_its_own() -> None:
    options = parsed(
        Options,
        {"launch": 2, "server_args": ["--base-gpu-id", "{index}"], "server_env": {"CUDA_VISIBLE_DEVICES": "{index}"}},
    )
    assert options.servers == 2
    assert options.numbered(1) == (("--base-gpu-id", "1"), {"CUDA_VISIBLE_DEVICES": "1"})


def test_kept_keys_and_values_need_steps_that_do_not_overlap() -> None:
    assert server_flags((), "keep", "auto") == ("--disable-overlap-schedule",)
    assert server_flags(("--disable-overlap-schedule",), "keep", "auto") == ()
    assert server_flags((), "recompute", "bfloat16") == ("--dtype", "bfloat16")
    assert server_flags(("--dtype=float32",), "resume", "bfloat16") == ()


def test_the_engine_is_built_by_its_name(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    config = Config.model_validate({"producer": {"engine": "sglang", "engine_options": {"launch": 1}, "slots": 8}})
    engine = build_engine("sglang", config, folder, seed=0)
    assert isinstance(engine, SglangEngine)
    assert (engine.slots, engine.version, engine.stats().busy_slots) == (8, None, 0)
    top_p = config.model_copy(update={"sampling": config.sampling.model_copy(update={"top_p": 0.9})})
    with pytest.raises(ConfigError, match=r"sampling.top_p = 0.9 without sampling.top_k"):
        build_engine("sglang", top_p, folder, seed=0)


def test_defaults_say_what_they_are() -> None:
    options = Options(launch=1)
    assert (options.kv, options.means, options.verify) == ("keep", "auto", "all")
