"""What goes wrong in a set-up says what to do: in the service's log and in its health status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compose.conftest import HERE
from tests.compose.stack import PATIENCE_S, Stack
from tests.support import wait_here


def says(stack: Stack, service: str, sentence: str) -> None:
    """It becomes unhealthy, with this in its last check and in its log."""
    wait_here(lambda: stack.health(service)[0] == "unhealthy", f"{service} is unhealthy", PATIENCE_S)
    assert sentence in stack.health(service)[1]
    assert sentence in stack.logs(service)


@pytest.fixture
def mended(running: Stack) -> Iterator[Stack]:
    """The running stack, of which a test starts the producer wrongly."""
    yield running
    running.up("--wait", "--force-recreate", "--no-deps", "producer")


def test_a_wrong_password(mended: Stack, secrets: Callable[..., Path]) -> None:
    mended.up("--force-recreate", "--no-deps", "producer", HEADRACE_SECRETS=str(secrets(password="another")))
    says(
        mended,
        "producer",
        "Redis at redis:6379 refuses the user or the password; correct HEADRACE_REDIS_URL or HEADRACE_REDIS_PASSWORD",
    )


def test_a_secret_that_is_empty(mended: Stack, secrets: Callable[..., Path]) -> None:
    mended.up("--force-recreate", "--no-deps", "producer", HEADRACE_SECRETS=str(secrets(token="")))
    says(mended, "producer", "HEADRACE_METRICS_TOKEN_FILE names /run/secrets/headrace/metrics_token, which is empty")


def test_redis_without_a_password(
    images: list[str], stack_of: Callable[..., Stack], secrets: Callable[..., Path]
) -> None:
    stack = stack_of("headrace-test-open", HEADRACE_SECRETS=str(secrets(password="")))
    failed = stack.up("--wait", "redis", check=False)
    assert failed.returncode
    says(stack, "redis", "the secret redis_password is missing, empty, or has white space in it; write a password into")


def test_a_password_of_odd_letters(
    images: list[str], stack_of: Callable[..., Stack], secrets: Callable[..., Path]
) -> None:
    stack = stack_of("headrace-test-odd", HEADRACE_SECRETS=str(secrets(password='o"d\\d#$HOME')))
    stack.up("--wait", "redis")
    assert "PONG" in stack.health("redis")[1]


def test_a_configuration_that_is_not_there(images: list[str], stack_of: Callable[..., Stack], tmp_path: Path) -> None:
    file = tmp_path / "rnu.toml"
    failed = stack_of("headrace-test-typo", HEADRACE_CONFIG=str(file)).up("--no-deps", "prepare", check=False)
    assert failed.returncode
    assert f"bind source path does not exist: {file}" in failed.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (Path.unlink, "which is missing; write the secret into a file there"),
        (lambda file: file.chmod(0o400), "which user 10001 may not read; let that user read it"),
    ],
    ids=["missing", "another's"],
)
def test_a_secret_that_is_not_to_be_read(
    mended: Stack, secrets: Callable[..., Path], spoil: Callable[[Path], None], sentence: str
) -> None:
    folder = secrets()
    spoil(folder / "metrics_token")
    mended.up("--force-recreate", "--no-deps", "producer", HEADRACE_SECRETS=str(folder))
    says(mended, "producer", f"HEADRACE_METRICS_TOKEN_FILE names /run/secrets/headrace/metrics_token, {sentence}")


def test_a_port_that_is_taken(mended: Stack) -> None:
    mended.with_files(HERE / "compose.port.yaml").up("--no-deps", "producer")
    says(mended, "producer", "port 9100 of /metrics on 0.0.0.0 cannot be bound (Address already in use)")
    assert "HEADRACE_METRICS_PORT" in mended.health("producer")[1]


def test_too_little_memory(mended: Stack) -> None:
    mended.up("--force-recreate", "--no-deps", "producer", HEADRACE_PRODUCER_MEMORY="64m")
    says(mended, "producer", "was ended by signal 9: this container's memory limit is too small for it; raise that")


def test_too_little_shared_memory(images: list[str], stack_of: Callable[..., Stack]) -> None:
    stack = stack_of("headrace-test-narrow", HEADRACE_SHM_SIZE="64k")
    failed = stack.up("--wait", "redis", "weights", "trainer", check=False)
    assert failed.returncode
    assert "trainer" in failed.stderr
    says(stack, "trainer", "/weights has 0 MB left, a weight version needs 0 MB; enlarge it (")
    assert "HEADRACE_SHM_SIZE" in stack.health("trainer")[1]


def test_a_model_volume_that_is_full(images: list[str], stack_of: Callable[..., Stack]) -> None:
    example = str(HERE.parents[1] / "examples" / "quickstart.toml")
    stack = stack_of("headrace-test-full", HERE / "compose.full.yaml", HEADRACE_CONFIG=example)
    failed = stack.up("weights", check=False)
    assert failed.returncode
    assert "prepare" in failed.stderr
    says(
        stack,
        "prepare",
        "model 'smollm2' cannot be written to /models: 1 MB are left and 450 are needed; make room there",
    )
