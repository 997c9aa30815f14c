"""Our rank in a torch.distributed group with a server: the child process of means "collective".

`python -m producers.engines.sglang.broadcasting`, with a socket as its standard input, as in
`weightsync/transports/pair.py`. Its orders:

    {"order": "lead", "address", "group", "backend", "world", "join_s"}  {"port": 1234}, then {"joined": true}
    {"order": "broadcast", "start", "nbytes"} and a file                  {"moved": 4194304}
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from weightsync.transports.pair import End, interface_of, main


class Leader(End):
    """Rank 0, from which the others receive."""

    def __init__(self) -> None:
        super().__init__()
        self._group: Any = None

    def follow(self, order: dict[str, Any], file: int | None) -> Iterator[dict[str, Any]]:
        match order["order"]:
            case "lead":
                yield from self._lead(order)
            case "broadcast":
                assert file is not None
                yield {"moved": self._broadcast(file, order["start"], order["nbytes"])}

    def _lead(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        address = order["address"]
        name = interface_of(address)
        if name and not ipaddress.ip_address(address).is_loopback:
            # Else a backend takes the address of this host's name, which on many hosts is a loopback one.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # torch itself would listen on all addresses of this host.
        listener = socket.create_server((address, 0), family=family)
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=order["join_s"])
        store = self._dist.TCPStore(
            address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        yield {"port": port}
        self._join(self._dist.PrefixStore(order["group"], store), order, 0)
        yield {"joined": True}

    def _join(self, store: Any, order: dict[str, Any], rank: int) -> None:
        """As a server joins: a group of its own, with neither end's default group in it."""
        from torch.distributed import distributed_c10d as c10d

        world = order["world"]
        self._group, _ = c10d._new_process_group_helper(
            world,
            rank,
            [],
            c10d.Backend(order["backend"]),
            store,
            group_name=order["group"],
            timeout=timedelta(seconds=order["join_s"]),
        )
        c10d._world.pg_group_ranks[self._group] = {member: member for member in range(world)}
        self._device = "cuda" if order["backend"] == "nccl" else "cpu"

    def _broadcast(self, file: int, start: int, nbytes: int) -> int:
        self._read(file, start, nbytes)
        self._dist.broadcast(self._tensor(nbytes).to(self._device), src=0, group=self._group)
        self._finish()
        return nbytes


if __name__ == "__main__":
    main(Leader)
