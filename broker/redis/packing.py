"""How a command becomes bytes: by the client's C library, which is ten times as fast for a script's many arguments.

A command with a large body is left to redis-py, which sends the body as it is instead of copying it. And how they are
sent: a connection that failed while nobody used it is one that is lost, where uvloop calls it a bug.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Any

import hiredis
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection

LARGE = 6000
"""Bytes; what redis-py does not copy."""


class _Packing:
    """Before a connection class of redis-py."""

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

    async def _send_packed_command(self, command: Iterable[bytes]) -> None:
        # Of one that was reset, redis-py looks only at whether the server has closed it.
        if self._writer.transport.is_closing():  # type: ignore[attr-defined]
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        await super()._send_packed_command(command)  # type: ignore[misc]


class _Tcp(_Packing, Connection):
    pass


class _Tls(_Packing, SSLConnection):
    pass


class _Unix(_Packing, UnixDomainSocketConnection):
    pass


PACKING: dict[Any, Any] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
"""The class to use instead."""
