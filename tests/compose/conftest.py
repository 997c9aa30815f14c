"""Real containers: the images of a clean clone, and a stack of them that trains while the tests look at it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compose.stack import CHECKOUT, Stack, clone_of
from tests.tiny import save_tiny_llama

HERE = Path(__file__).parent
ASKED = os.environ.get("HEADRACE_TEST_COMPOSE") == "1"
ALL = os.environ.get("HEADRACE_TEST_ALL_SERVERS") == "1"
"""What is missing fails its tests."""
PROJECT = "headrace-test"
PROMETHEUS = "headrace-test-prometheus:latest"
PASSWORD, TOKEN = "a-password-of-the-tests", "a-token-of-the-tests"
CONFIG = """
[run]
steps = 1000000

[model]
path = "/tiny"
dtype = "float32"
context_length = 96

[[environments]]
name = "environment.py:Chance"

[sampling]
max_new_tokens = 16

[producer]
engine = "{engine}"
engine_options = {options}
slots = 8
lease_s = 3

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"

[checkpoint]
every = 5
"""


def missing() -> str:
    """Why there are no containers here; empty where there are."""
    if shutil.which("docker") is None:
        return "there is no `docker` here"
    for command in (["docker", "version", "--format", "{{.Server.Version}}"], ["docker", "compose", "version"]):
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if asked.returncode:
            return f"`{' '.join(command[:2])}` fails: {asked.stderr.strip().splitlines()[0]}"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All share a machine and a stack: one after another, in the order in which they stand."""
    here = [item for item in items if HERE in item.path.parents]
    if not here:
        return
    if ASKED:
        reason = "" if ALL else missing()
    else:
        reason = missing() or "they build images and run containers; `make test-compose` runs these"
    for item in here:
        item.add_marker(pytest.mark.timeout(2400))
        if reason and "containers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=f"containers: {reason}"))


@pytest.fixture(scope="session")
def containers() -> None:
    """What needs a Docker engine."""


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone_of(CHECKOUT, tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every user may read, as the containers' is another one."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder of secrets."""

    def make(password: str = PASSWORD, token: str = TOKEN) -> Path:
        folder = tmp_path_factory.mktemp("secrets")
        # pytest's own folders are for nobody else: so is the folder around it, which no container needs to enter.
        folder.chmod(0o755)
        for name, secret in (("redis_password", password), ("metrics_token", token), ("grafana_password", "x")):
            (folder / name).write_text(secret)
            (folder / name).chmod(0o444)
        return folder

    return make


@pytest.fixture(scope="session")
def stack_of(
    containers: None, clone: Path, model: Path, secrets: Callable[..., Path]
) -> Iterator[Callable[..., Stack]]:
    """Makes projects, and takes them away again with all that they kept."""
    made: list[Stack] = []

    def make(
        project: str, *files: Path, engine: str = "scripted", options: str = "{ step_s = 0.05 }", **environ: str
    ) -> Stack:
        config = clone / f"{project}.toml"
        config.write_text(CONFIG.format(engine=engine, options=options))
        config.chmod(0o644)
        known = {
            "HEADRACE_VERSION": "test",
            "HEADRACE_CONFIG": str(config),
            "HEADRACE_SECRETS": str(secrets()),
            "HEADRACE_TEST_MODEL": str(model),
            "HEADRACE_TEST_ENVIRONMENT": str(clone / "tests" / "compose" / "environment.py"),
            "HEADRACE_PROMETHEUS_IMAGE": PROMETHEUS,
            "HEADRACE_PROMETHEUS_PORT": str(free_port()),
        }
        stack = Stack(clone, project, *files, HERE / "compose.test.yaml", **known | environ)
        stack.down()
        made.append(stack)
        return stack

    yield make
    for stack in made:
        stack.down()


@pytest.fixture(scope="session")
def images(stack_of: Callable[..., Stack]) -> list[str]:
    """Builds all of headrace's; their names."""
    stack = stack_of(PROJECT)
    # One after another: the classic builder would make what they share once for each.
    stack.compose("build", COMPOSE_PARALLEL_LIMIT="1")
    return [f"headrace-{role}:test" for role in ("weights", "trainer", "producer", "prepare")]


@pytest.fixture(scope="session")
def prometheus_image(containers: None) -> str:
    build = ["docker", "build", "--quiet", "--tag", PROMETHEUS, str(HERE / "prometheus")]
    subprocess.run(build, env={**os.environ, "DOCKER_BUILDKIT": "0"}, check=True, timeout=600, capture_output=True)
    return PROMETHEUS


@pytest.fixture(scope="session")
def running(images: list[str], prometheus_image: str, stack_of: Callable[..., Stack]) -> Stack:
    """The stack with Prometheus, from nothing; tests leave it as they found it: healthy, with one producer."""
    stack = stack_of(PROJECT)
    stack.up("--wait")
    # By its name: there is no image of Grafana here.
    stack.up("--wait", "--no-deps", "prometheus")
    return stack


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
