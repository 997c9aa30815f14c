"""The run's record at the broker: written before any service starts, and put back where Redis lost it meanwhile."""

from __future__ import annotations

import time
from dataclasses import replace

from broker.api import OperatorPort, RunRecord, Runs
from broker.messages import SCHEMA
from deploy.plan import Plan


class Registrar:
    """Of one run. Its methods raise BrokerError."""

    def __init__(self, plan: Plan, runs: Runs, operator: OperatorPort) -> None:
        self._runs = runs
        self._operator = operator
        self._resume = plan.resume
        self._record = RunRecord(
            run_id=plan.folder.run_id,
            schema=SCHEMA,
            config=plan.config.model_dump(mode="json"),
            digests=plan.facts.digests,
            vocab_size=plan.facts.vocab_size,
            created_ms=int(time.time() * 1000),
            folder=str(plan.folder.path),
            dataset_sizes=plan.facts.dataset_sizes,
        )

    async def register(self) -> None:
        """Create the run, or go on with the one that is there."""
        if not self._resume or await self.lost():
            await self._runs.create(self._record)
        else:
            stored = await self._operator.record()
            self._record = replace(stored, config=self._record.config)
            if stored != self._record:
                await self._runs.amend(self._record)
            await self._operator.set_status("running", "resumed")
        # Who has read it once knows a Redis that lost it from a run that never was.
        await self._operator.record()

    async def lost(self) -> bool:
        """Whether the broker has no such run."""
        return self._record.run_id not in await self._runs.ids()

    async def put_back(self) -> None:
        """The record alone: the run begins anew in the broker. No trainer may live that knows more of it."""
        await self._runs.create(self._record)

    async def close(self) -> None:
        await self._runs.close()
