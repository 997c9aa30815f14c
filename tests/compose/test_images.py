"""What the images are and are not."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from typing import IO

import pytest

from tests.compose.conftest import PASSWORD, TOKEN
from tests.compose.stack import CHECKOUT, inspected

SMALL = 1 << 20


def test_their_sizes(images: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {image: inspected(image)["Size"] for image in images}
    with capsys.disabled():
        print("\n" + "\n".join(f"{size / 1e6:7.0f} MB  {image}" for image, size in sizes.items()))
    weights, trainer, producer, prepare = sizes.values()
    assert weights < trainer / 2
    assert trainer == producer <= prepare


def test_the_weight_services_image_has_no_torch(images: list[str]) -> None:
    weights, trainer, *_ = images
    found = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    heavy = ("torch", "transformers", "triton", "nvidia")
    assert ran(weights, "python", "-c", found, *heavy, "weightsync") == "['weightsync']\n"
    assert ran(weights, "find", "/opt", "/usr", "/home", "-type", "d", "-name", "torch") == ""
    assert ran(trainer, "python", "-c", found, *heavy, "consumers") == "['torch', 'transformers', 'consumers']\n"


def test_what_they_hold_is_what_the_constraints_say(images: list[str]) -> None:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pinned = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    for image in images:
        for each in json.loads(ran(image, "python", "-m", "pip", "list", "--format", "json")):
            name, version = each["name"].lower().replace("_", "-"), each["version"].partition("+")[0]
            if name not in ("pip", "setuptools", "headrace"):
                assert version == pinned.get(name, "").partition("+")[0], f"{name} of {image}"


def test_they_run_as_a_user_without_rights_and_say_what_they_are(images: list[str]) -> None:
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    for image in images:
        config = inspected(image)["Config"]
        assert config["User"] == "headrace"
        assert config["Labels"]["org.opencontainers.image.version"] == version
        assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert ran(image, "id", "-u").strip() == "10001"


def test_no_secret_and_nothing_of_the_checkout_is_in_any_layer(images: list[str]) -> None:
    secrets = [PASSWORD.encode(), TOKEN.encode(), b"only-containers-of-this-project"]
    for image in images:
        done = subprocess.run(["docker", "history", "--no-trunc", image], capture_output=True, timeout=60, check=True)
        assert not [secret for secret in secrets if secret in done.stdout]
    names = set()
    for name, data in small_files(images):
        assert not [secret for secret in secrets if secret in data], name
        names.add(name)
    assert not [name for name in names if name.endswith(("/.env", ".git/HEAD")) or "tests/compose/" in name]
    assert [name for name in names if name.endswith("headrace/probe.py")]


def small_files(images: list[str]) -> Iterator[tuple[str, bytes]]:
    """Of every layer, whatever a later one hides; libraries and data of others are left out by their size."""
    with subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        with tarfile.open(fileobj=saving.stdout, mode="r|") as layers:
            for layer in layers:
                if layer.isfile() and layer.name.endswith("layer.tar"):
                    yield from files_of(layers.extractfile(layer))


def files_of(layer: IO[bytes] | None) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=layer, mode="r|") as files:
        for file in files:
            if file.isfile() and file.size < SMALL and (stream := files.extractfile(file)):
                yield f"/{file.name}", stream.read()


def ran(image: str, *command: str) -> str:
    done = subprocess.run(
        ["docker", "run", "--rm", "--network", "none", "--entrypoint", command[0], image, *command[1:]],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
