"""Dead letters: entries that nobody could use, kept with their reason until somebody replays or drops them."""

from __future__ import annotations

import re
from typing import cast, get_args

from broker.dead import Obstacle, obstacle
from broker.leases import counted
from broker.looks import DeadLetter
from broker.redis.link import Fields, fields_of, text
from broker.redis.service import RedisService

_ID = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


class RedisDead(RedisService):
    """The part of OperatorPort that stream `dead` answers."""

    async def dead(self, after: str, count: int) -> list[DeadLetter]:
        if count < 1 or (after and not _ID.fullmatch(after)):
            return []
        rows = await self._link.script("list_dead", after, count)
        return [_letter(text(letter_id), fields_of(flat)) for letter_id, flat in rows]

    async def dead_letter(self, letter_id: str) -> DeadLetter:
        found = await self._link.send("XRANGE", self._stream, letter_id, letter_id) if _ID.fullmatch(letter_id) else ()
        if not found:
            raise obstacle(letter_id, "unknown")
        return _letter(letter_id, found[0][1])

    async def replay_dead(self, letter_id: str) -> None:
        answer = text(await self._link.script("replay_dead", letter_id)) if _ID.fullmatch(letter_id) else "unknown"
        if answer in get_args(Obstacle):
            raise obstacle(letter_id, cast(Obstacle, answer))

    async def drop_dead(self, letter_ids: list[str]) -> int:
        known = [letter_id for letter_id in letter_ids if _ID.fullmatch(letter_id)]
        return int(await self._link.send("XDEL", self._stream, *known)) if known else 0

    @property
    def _stream(self) -> str:
        return self._link.keys.of("dead")


def _letter(letter_id: str, fields: Fields) -> DeadLetter:
    return DeadLetter(
        letter_id=letter_id,
        source="tasks" if fields.get(b"source") == b"tasks" else "groups",
        task_id=text(fields.get(b"task")),
        attempt=text(fields.get(b"attempt")),
        kind=text(fields.get(b"kind")),
        reason=text(fields.get(b"reason")),
        sha256=text(fields.get(b"sha256")),
        length=counted(text(fields.get(b"length"))) or 0,
        body=fields.get(b"body", b""),
    )
