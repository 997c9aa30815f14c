"""`headrace stop` of a run that has services beyond its launcher's, in a Redis that all share."""

import json
import subprocess
import sys
from pathlib import Path

from deploy.redis_server import RedisServer
from tests.standins import Project, running, wait_until


def test_a_weight_service_of_another_host_leaves_too(project: Project, tmp_path: Path) -> None:
    """The launcher did not start it, and would not tell it."""
    server = RedisServer(tmp_path / "shared", tmp_path / "shared.log")
    foreign = None
    try:
        server.start()
        environ = {"HEADRACE_REDIS_URL": server.url}
        project.hold()
        process = project.up("--run", "r", **environ)
        running(project)
        (tmp_path / "shm").mkdir()
        there = {"HEADRACE_RUN": "r", "HEADRACE_HOST": "there", "HEADRACE_SHM_DIR": str(tmp_path / "shm")}
        # The real one: from the checkout the stand-ins are not seen.
        foreign = subprocess.Popen(
            [sys.executable, "-m", "weightsync", "--name", "weights-there"],
            env=project.environ(**environ, **there),
            stderr=subprocess.PIPE,
            text=True,
        )

        def joined() -> bool:
            peers = json.loads(project.headrace("status", "--json", **environ).stdout)["processes"]
            return any(peer["name"] == "weights-there" and peer["alive"] for peer in peers)

        wait_until(joined, "the other host's weight service")
        stopped = project.headrace("stop", "--patience", "40", **environ)
        assert (stopped.stdout, stopped.stderr) == ("run r stopped\n", "")
        _, err = foreign.communicate(timeout=30)
        assert "order stop: headrace stop" in err
        assert foreign.returncode == 0
        assert process.wait(30) == 0
    finally:
        if foreign is not None:
            foreign.kill()
            foreign.communicate(timeout=30)
        server.stop()
