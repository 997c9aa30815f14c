"""What a user can get wrong before a run starts: one sentence with field, value and way out, and nothing begun."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launches import Launches
from tests.support import RedisProcess

SECRET = "word-that-nobody-may-see"

WRONG_VALUES: list[tuple[str, tuple[str, ...]]] = [
    ("trainer.rate=3", ("trainer.rate (from command line) is not a known configuration key", "`headrace config`")),
    ("staleness.max_lag=-1", ("staleness.max_lag = -1 (from command line)", "greater than or equal to 0")),
    ("run.steps='many'", ("run.steps = 'many' (from command line)", "integer")),
    ("producer.slots=4", ("trainer.group_size: 8 rollouts do not fit into producer.slots = 4", "raise the slots")),
    ("sampling.max_new_tokens=512", ("sampling.max_new_tokens: 512 leaves no room", "model.context_length = 512")),
    ("producer.engine='vllm'", ("producer.engine = 'vllm'", "openai, scripted, sglang, torch")),
    ("evaluation.prompts=2000", ("evaluation.prompts = 2000", "has only")),
    ("evaluation.environment='sums'", ("'sums' is none of the environments (arithmetic)", "weight = 0")),
    ("telemetry.host='0.0.0.0'", ("telemetry.host = '0.0.0.0' (from command line)", "'127.0.0.1'")),
]

ENVIRONMENTS: list[tuple[str, tuple[str, ...]]] = [
    ("arithmetics", ("environment 'arithmetics' is not known", "built-in name")),
    ("{folder}/missing.py:Mine", ("missing.py does not exist",)),
    ("{folder}/syntax.py:Mine", ("syntax.py does not import (SyntaxError: ",)),
    ("{folder}/raises.py:Mine", ("raises.py does not import (ModuleNotFoundError: No module named 'no_such_thing')",)),
    ("{folder}/empty.py:Mine", ("empty.py has no object 'Mine', only Other",)),
    ("no_such_package.module:Mine", ("module no_such_package.module does not import (ModuleNotFoundError: ",)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Files that are wrong, and models that do not serve."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "syntax.py").write_text("class Mine(:\n")
    (folder / "raises.py").write_text("import no_such_thing\n")
    (folder / "empty.py").write_text("class Other: ...\n")
    (folder / "bert").mkdir()
    bert = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 99}
    (folder / "bert" / "config.json").write_text(json.dumps(bert))
    for file in ("model.safetensors", "tokenizer.json"):
        shutil.copy(tiny_model / file, folder / "bert")
    (folder / "no-weights").mkdir()
    shutil.copy(tiny_model / "config.json", folder / "no-weights")
    return folder


@pytest.fixture(scope="module")
def refusing(module_launches: Launches, tiny_model: Path) -> Iterator[Any]:
    """`refused(code, *fragments, up=…, **environ)` starts a run that must not start."""

    def refused(code: int, fragments: tuple[str, ...], *arguments: str, **environ: str) -> None:
        done = module_launches.headrace("up", "--model", str(tiny_model), *arguments, **environ)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("headrace: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        for fragment in fragments:
            assert fragment in done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert not module_launches.runs.exists()
        assert module_launches.processes() == []

    return refused


@pytest.mark.parametrize(("value", "fragments"), WRONG_VALUES)
def test_a_wrong_value(value: str, fragments: tuple[str, ...], refusing: Any) -> None:
    refusing(2, fragments, "--set", value)


@pytest.mark.parametrize(("name", "fragments"), ENVIRONMENTS)
def test_an_environment_that_does_not_load(name: str, fragments: tuple[str, ...], refusing: Any, folder: Path) -> None:
    name = name.format(folder=folder)
    refusing(2, (f"environment {name!r}", *fragments), "--set", f"environments=[{{name={json.dumps(name)}}}]")


@pytest.mark.parametrize(
    ("model", "fragments"),
    [
        ("{folder}/nowhere", ("does not exist", "name a local folder, a hub id")),
        ("{folder}/bert", ("is BertForMaskedLM, not a causal language model",)),
        ("{folder}/no-weights", ("has no .safetensors weights",)),
        ("nobody/nothing", ("is no local folder, and the hub does not give it",)),
    ],
)
def test_a_model_that_does_not_serve(model: str, fragments: tuple[str, ...], refusing: Any, folder: Path) -> None:
    model = model.format(folder=folder)
    refusing(2, (f"model.path = {model!r}", *fragments), "--model", model)


def test_a_file_that_is_no_toml(refusing: Any, folder: Path) -> None:
    (folder / "bad.toml").write_text("[run\n")
    refusing(2, ("bad.toml is not valid TOML",), "--config", str(folder / "bad.toml"))
    refusing(2, ("missing.toml cannot be read: No such file",), "--config", str(folder / "missing.toml"))


def test_a_redis_that_does_not_answer(refusing: Any) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://:{SECRET}@127.0.0.1:{silent.getsockname()[1]}/0"
        patience = ("--set", "broker.connect_timeout_s=1", "--set", "broker.stream_block_ms=10")
        refusing(3, ("does not answer in time; gave up after ",), *patience, HEADRACE_REDIS_URL=url)


def test_a_wrong_password(refusing: Any, redis_server: RedisProcess) -> None:
    url = f"redis://:{SECRET}@127.0.0.1:{redis_server.port}/0"
    refusing(3, (f"Redis at 127.0.0.1:{redis_server.port} refuses the user or the password",), HEADRACE_REDIS_URL=url)


@pytest.mark.parametrize(
    ("value", "fragments"),
    [
        (
            "trainer.loss='numpy:no_loss'",
            ("trainer exited with 2: trainer: trainer.loss = 'numpy:no_loss': module numpy has no object 'no_loss'",),
        ),
        ("model.device='cuda:9'", ("model.device = 'cuda:9' does not take the model",)),
    ],
)
def test_what_only_a_service_finds_out(
    value: str, fragments: tuple[str, ...], launched: Launches, tiny_model: Path
) -> None:
    done = launched.headrace("up", "--model", str(tiny_model), "--set", value)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for fragment in ("headrace: ", *fragments, "(log: "):
        assert fragment in done.stderr
    assert launched.processes() == []
    assert launched.segments == []
