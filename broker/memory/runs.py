"""All runs of one memory broker. Brokers are found by URL, so that the services of a process share one."""

from __future__ import annotations

from dataclasses import replace

from broker.api import RunRecord
from broker.keys import Keys
from broker.memory.dead import MemoryDead
from broker.memory.operator import MemoryOperator
from broker.memory.producer import MemoryProducer
from broker.memory.store import RunStore, now_ms
from broker.memory.trainer import MemoryTrainer
from broker.memory.weights import MemoryWeights
from headrace.errors import Refused

_brokers: dict[str, dict[str, RunStore]] = {}
"""By URL; a broker leaves with its last run."""


class MemoryRun(MemoryProducer, MemoryTrainer, MemoryWeights, MemoryOperator, MemoryDead):
    """ProducerPort, TrainerPort, WeightsPort and OperatorPort of one run."""


class MemoryRuns:
    """Runs in memory."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def ping(self) -> None:
        """It is always there."""

    async def create(self, record: RunRecord) -> None:
        run_id = Keys(record.run_id).run_id
        runs = _brokers.setdefault(self._url, {})
        if run_id in runs:
            raise Refused(f"run id {run_id!r} is taken in this process's memory; choose another")
        runs[run_id] = RunStore(replace(record, created_ms=record.created_ms or now_ms()))

    async def amend(self, record: RunRecord) -> None:
        store = _brokers.get(self._url, {}).get(record.run_id)
        if store is None:
            raise Refused(f"there is no run {record.run_id!r} in this process's memory")
        store.record = record

    async def ids(self) -> list[str]:
        return sorted(_brokers.get(self._url, {}))

    async def delete(self, run_id: str) -> int:
        runs = _brokers.get(self._url, {})
        store = runs.pop(run_id, None)
        if not runs:
            _brokers.pop(self._url, None)
        if store is None:
            return 0
        store.gone = True
        store.wake()
        return 1

    async def close(self) -> None:
        """Nothing is held."""

    def run(self, run_id: str, max_deliveries: int) -> MemoryRun:
        """One service's view of a run, which may not be there."""
        return MemoryRun(Keys(run_id).run_id, _brokers.get(self._url, {}).get(run_id), max_deliveries)
