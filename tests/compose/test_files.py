"""What can be said of the files without starting anything."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.compose.stack import CHECKOUT, Stack

DEPLOY = CHECKOUT / "deploy"
OVERRIDES = [DEPLOY / f"compose.{name}.yaml" for name in ("tcp", "gpu")]
COMBINATIONS = [some for count in range(3) for some in itertools.permutations(OVERRIDES, count)]
OLDEST, NEWEST = "1.29", "1.37"
"""Releases of Kubernetes; the first has sidecar containers."""


@pytest.mark.parametrize("files", COMBINATIONS, ids=lambda files: "+".join(file.stem for file in files) or "alone")
@pytest.mark.parametrize("profile", ["", "observability"])
def test_all_combinations_of_files_are_valid(containers: None, files: tuple[Path, ...], profile: str) -> None:
    stack = Stack(CHECKOUT, "headrace-config", *files, COMPOSE_PROFILES=profile)
    stack.compose("config", "--quiet")
    services = json.loads(stack.compose("config", "--format", "json").stdout)["services"]
    assert {"redis", "prepare", "weights", "trainer", "producer"} <= services.keys()
    assert ("prometheus" in services) == bool(profile)
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port["host_ip"] == "127.0.0.1" for port in published)
    assert {name for name, service in services.items() if service.get("ports")} <= {"prometheus", "grafana"}
    for name in ("weights", "trainer", "producer"):
        assert services[name]["networks"].keys() == {"internal"}
        assert services[name]["restart"] == "on-failure"


def test_the_file_of_ones_own_that_the_docs_show_is_valid(containers: None, tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (CHECKOUT / "docs" / "deployment.md").read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(shown)
    stack = Stack(CHECKOUT, "headrace-config", tmp_path / "mine.yaml")
    services = json.loads(stack.compose("config", "--format", "json").stdout)["services"]
    for name in ("prepare", "trainer", "producer"):
        mounted = {each["target"]: each["source"] for each in services[name]["volumes"]}
        assert mounted["/my_environment.py"] == str(DEPLOY / "my_environment.py")
        assert {"/runs", "/models", "/my_model", "/my_loss.py"} <= mounted.keys()


def test_the_dashboards_are_those_of_the_script(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "grafana" / "build.py", tmp_path)
    (tmp_path / "dashboards").mkdir()
    subprocess.run([sys.executable, str(tmp_path / "build.py")], check=True, timeout=60)
    made = {file.name: file.read_text() for file in (tmp_path / "dashboards").iterdir()}
    assert made == {file.name: file.read_text() for file in (DEPLOY / "grafana" / "dashboards").iterdir()}


@pytest.fixture(scope="module", params=["base", "gpu"])
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """As `kubectl apply -k` sends them."""
    if shutil.which("kubectl") is None and os.environ.get("HEADRACE_TEST_ALL_SERVERS") != "1":
        pytest.skip("there is no kubectl here, which puts the manifests together")
    made = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / request.param)], capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_the_manifests_are_valid_and_say_nothing_that_kubernetes_would_ignore(
    manifests: list[dict[str, Any]], release: str
) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, release, strict=True)
    kinds = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert {("Deployment", "producer"), ("Job", "trainer"), ("Job", "prepare"), ("StatefulSet", "redis")} <= set(kinds)


def test_pods_wait_for_the_run_and_have_time_to_drain(manifests: list[dict[str, Any]]) -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in manifests
        if "template" in each.get("spec", {})
    }
    for name, least in (("producer", 30 + 30 + 20), ("trainer", 120 + 20)):
        assert pods[name]["terminationGracePeriodSeconds"] >= least
        assert pods[name]["initContainers"][0]["name"] == "registered"
    assert all(pod["securityContext"]["runAsNonRoot"] for pod in pods.values())


def test_a_field_that_is_misspelt_is_found(manifests: list[dict[str, Any]]) -> None:
    deployment = next(each for each in manifests if each["kind"] == "Deployment")
    deployment = {**deployment, "spec": {**deployment["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)
