"""All runs of one Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from broker.api import RunRecord
from broker.bounds import KEEP_DELETED_MS
from broker.keys import ALL_RECORDS, Keys, run_of
from broker.redis.connection import Connection
from broker.redis.link import text
from broker.redis.records import encode_record
from broker.redis.scripts import scripts
from headrace.errors import Refused

SCAN = 512
"""Keys that one SCAN looks at."""


class RedisRuns:
    """Runs on Redis."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Commands of the moment: nobody wants them minutes later.
        connection.hasten()

    async def ping(self) -> None:
        await self._send("PING")

    async def create(self, record: RunRecord) -> None:
        keys = Keys(record.run_id)
        if not record.created_ms:
            seconds, micros = await self._send("TIME")
            record = replace(record, created_ms=int(seconds) * 1000 + int(micros) // 1000)
        if not await self._script("create", keys, encode_record(record)):
            raise Refused(f"run id {record.run_id!r} is taken at Redis at {self._connection.place}; choose another")

    async def amend(self, record: RunRecord) -> None:
        key = Keys(record.run_id).of("record")
        if not await self._send("SET", key, encode_record(record), "XX", "KEEPTTL"):
            raise Refused(f"there is no run {record.run_id!r} in Redis at {self._connection.place}")

    async def ids(self) -> list[str]:
        return sorted({run_of(key) for key in await self._keys(ALL_RECORDS)})

    async def delete(self, run_id: str) -> int:
        """The record first: without it no script writes, so nothing of the run comes back.

        A mark stays for an hour, so that its trainer does not take the run for one that Redis lost.
        """
        keys = Keys(run_id)
        deleted = int(await self._script("delete", keys, KEEP_DELETED_MS))
        found = [key for key in await self._keys(keys.everything) if key != keys.of("deleted")]
        for first in range(0, len(found), SCAN):
            deleted += int(await self._send("UNLINK", *found[first : first + SCAN]))
        return deleted

    async def close(self) -> None:
        await self._connection.close()

    async def _keys(self, pattern: str) -> list[str]:
        found: set[str] = set()
        cursor = 0
        while True:
            cursor, page = await self._send("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN)
            found.update(text(key) for key in page)
            if not cursor:
                return sorted(found)

    async def _script(self, name: str, keys: Keys, *args: Any) -> Any:
        script = scripts()[name]
        return await self._send("EVALSHA", script.sha, len(script.keys), *map(keys.of, script.keys), *args)

    async def _send(self, *command: Any) -> Any:
        return await self._connection.call(lambda: self._connection.execute(*command))
