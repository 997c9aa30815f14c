"""How each service of a local run is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deploy.cores import Cores
from deploy.processes import Command
from deploy.run_folder import RunFolder
from deploy.supervisor import Part
from headrace.config import Config

Role = str

MODULES: dict[Role, str] = {"producer": "producers", "trainer": "consumers", "weights": "weightsync"}
"""Role to the module that `python -m` runs."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclass(slots=True)
class Services:
    """Makes parts for one run. The broker's URL goes through the environment only, never through arguments."""

    config: Config
    folder: RunFolder
    url: str
    cores: Cores
    resume: bool
    modules: dict[Role, str] = field(default_factory=lambda: dict(MODULES))
    made: dict[Role, int] = field(default_factory=dict)

    def part(self, role: Role) -> Part:
        """A new part of this role: "trainer", "weights", or "producer-1" and so on; a number is never used twice."""
        number = self.made.get(role, 0) + 1
        self.made[role] = number
        name = f"{role}-{number}" if role == "producer" else role
        part = Part.of(name, role, self.command(name, role))
        if role == "producer":
            part.limits = replace(part.limits, deliveries=self.config.broker.max_deliveries)
        return part

    def command(self, name: str, role: Role) -> Callable[[bool], Command]:
        """What starts the part that was made last of this role; called with whether it is started again."""
        threads = self._threads(role)
        port = self._port(role)
        processes = self.config.trainer.ranks if role == "trainer" else 1
        cores = self.cores.take(name, processes * threads) if role != "weights" else None

        def command(again: bool) -> Command:
            resume = ("--resume",) if role == "trainer" and (again or self.resume) else ()
            return Command(
                argv=(sys.executable, "-m", self.modules[role], *resume),
                env={
                    "HEADRACE_REDIS_URL": self.url,
                    "HEADRACE_REDIS_URL_FILE": "",
                    "HEADRACE_RUN": self.folder.run_id,
                    "HEADRACE_NAME": name,
                    "HEADRACE_METRICS_PORT": str(port),
                    "PYTHONUNBUFFERED": "1",
                    **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
                },
                log=self.folder.log(name),
                cores=cores,
            )

        return command

    def _threads(self, role: Role) -> int:
        return {"producer": self.config.producer.threads, "trainer": self.config.trainer.threads}.get(role, 1)

    def _port(self, role: Role) -> int:
        """Trainer, weight service, then the configured producers take the ports from `telemetry.port` on.

        Those were seen to be free before the start; producers that are added later take any free one (0).
        """
        first = self.config.telemetry.port
        if role == "producer" and self.made[role] > self.config.producer.count:
            return 0
        offset = {"trainer": 0, "weights": 1}.get(role, 1 + self.made[role])
        return first + offset if first else 0
