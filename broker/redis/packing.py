"""How a command becomes bytes: by the client's C library, which is ten times as fast for a script's many arguments.

A command with a large body is left to redis-py, which sends the body as it is instead of copying it. What the socket
takes at once, and a reply that has come already, needs no time limit: redis-py makes a task of each write, and a timer
for each reply of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hiredis
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError, ResponseError

LARGE = 6000
"""Bytes; what redis-py does not copy."""
_REPLIES = (bytes, int, list, type(None))


class _Packing:
    """Before a connection class of redis-py."""

    _reader: Any
    _writer: Any
    _parser: Any

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if self._writer is not None and not isinstance(command, (bytes, str)):
            self._writer.writelines(command)
            if self._writer.transport.get_write_buffer_size() == 0:
                return
            command = ()
        await super().send_packed_command(command, check_health)  # type: ignore[misc]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        if self._reader is not None and not args and not options:
            try:
                reply = self._parser._reader.gets()
                if isinstance(reply, RedisError) and not isinstance(reply, ResponseError):
                    raise reply
            except RedisError:
                await self.disconnect(nowait=True)  # type: ignore[attr-defined]
                raise
            if isinstance(reply, ResponseError):
                raise reply
            if type(reply) in _REPLIES:
                return reply
        return await super().read_response(*args, **options)  # type: ignore[misc]

    def pack_command(self, *args: Any) -> list[bytes]:
        if bytes in {*map(type, args)} and any(type(arg) is bytes and len(arg) > LARGE for arg in args):
            return self._packed_by_redis_py(*args)
        try:
            # As in "SCRIPT LOAD", which are two arguments.
            return [hiredis.pack_command((*args[0].split(), *args[1:]))]
        except TypeError:
            return self._packed_by_redis_py(*args)

    def _packed_by_redis_py(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = super().pack_command(*args)  # type: ignore[misc]
        return packed


class _Tcp(_Packing, Connection):
    pass


class _Tls(_Packing, SSLConnection):
    pass


class _Unix(_Packing, UnixDomainSocketConnection):
    pass


PACKING: dict[Any, Any] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
"""The class to use instead."""
