"""How a command becomes bytes: by the client's C library, which is ten times as fast for a script's many arguments.

A command with a large body is left to redis-py, which sends the body as it is instead of copying it.
"""

from __future__ import annotations

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


class _Tcp(_Packing, Connection):
    pass


class _Tls(_Packing, SSLConnection):
    pass


class _Unix(_Packing, UnixDomainSocketConnection):
    pass


PACKING: dict[Any, Any] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
"""The class to use instead."""
