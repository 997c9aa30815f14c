"""A compose project as a person drives it: `docker compose` in a copy of this checkout, and what is seen of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from headrace.version import PolicyVersion

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 240.0
"""Of one wait, on a machine that others share."""
LONGEST_S = 1500.0
"""Of one command: the first build."""


class Stack:
    """One project of `docker compose`, with the files that it is made of."""

    def __init__(self, clone: Path, project: str, *files: Path, **environ: str) -> None:
        """`files` come after the clone's own compose.yaml."""
        self.project = project
        self._clone = clone
        self.files = (clone / "deploy" / "compose.yaml", *files)
        self.environ = environ

    def compose(self, *arguments: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """One command to its end. With `check`, one that fails ends the test with what it said."""
        files = [part for file in self.files for part in ("-f", str(file))]
        command = ["docker", "compose", "-p", self.project, *files, *arguments]
        # As in a shell of its own: what pytest's was told of headrace is not for it.
        known = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE", "COMPOSE"))}
        known |= {"DOCKER_BUILDKIT": "0", **self.environ, **environ}
        done = subprocess.run(command, cwd=self._clone, env=known, capture_output=True, text=True, timeout=LONGEST_S)
        assert done.returncode == 0 or not check, (
            f"{' '.join(arguments)}: {done.stderr or done.stdout}\n{self.troubles()}"
        )
        return done

    def with_files(self, *files: Path) -> Stack:
        """The same project with further files."""
        return Stack(self._clone, self.project, *self.files[1:], *files, **self.environ)

    def up(self, *arguments: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Without building: the session's images."""
        return self.compose("up", "-d", "--no-build", *arguments, check=check, **environ)

    def down(self) -> None:
        """With everything that is kept."""
        self.compose("--profile", "observability", "down", "--volumes", "--remove-orphans", "--timeout", "20")

    def containers(self, service: str = "") -> list[str]:
        """Ids, of those that have ended too."""
        return self.compose("ps", "--all", "--quiet", *([service] if service else []), check=False).stdout.split()

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's first container."""
        return inspected(self.containers(service)[0])

    def health(self, service: str) -> tuple[str, str]:
        """Status, and what its health check has said: the last few times."""
        health = self.inspect(service)["State"].get("Health", {})
        return health.get("Status", "none"), "".join(each["Output"] for each in health.get("Log") or [])

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", service, check=False).stdout

    def execute(self, service: str, *command: str, check: bool = True) -> str:
        return self.compose("exec", "-T", service, *command, check=check).stdout

    def status(self) -> dict[str, Any]:
        """`headrace status`, asked where compose.yaml says."""
        return dict(json.loads(self.execute("weights", "headrace", "status", "--json")))

    def step(self) -> int:
        """The newest that the trainer has made, from its own lines: no other service need live to know."""
        return self.versions()[-1].step

    def versions(self) -> list[PolicyVersion]:
        """Of all steps that were made, in the order in which they were."""
        lines = self.execute("trainer", "cat", "/runs/run/steps.jsonl").split("\n")[:-1]
        return [PolicyVersion.parse(json.loads(line)["version"]) for line in lines]

    def producers(self) -> dict[str, dict[str, Any]]:
        """Those that live, by name: their newest heartbeat."""
        processes = self.status()["processes"]
        return {each["name"]: each["state"] for each in processes if each["role"] == "producer" and each["alive"]}

    def troubles(self) -> str:
        """What a test that fails should show."""
        done = subprocess.run(
            ["docker", "compose", "-p", self.project, "logs", "--tail", "15"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout


def inspected(container: str) -> dict[str, Any]:
    """Of a container or an image."""
    done = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout)[0])


def clone_of(checkout: Path, target: Path) -> Path:
    """What a clone of this checkout holds once everything in it is committed; and the wheels beside it, if any."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=checkout, capture_output=True, text=True, check=True).stdout
    wheels = [str(file.relative_to(checkout)) for file in (checkout / "deploy" / "wheels").glob("*.whl")]
    for name in [*files.split("\0")[:-1], *wheels]:
        if (checkout / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, target / name)
    return target
