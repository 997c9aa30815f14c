"""Joining: how the ranks of a trainer come to be and find each other.

`torchrun`, or whatever sets its variables, starts one process per rank. Without it a trainer with `trainer.ranks` above
1 starts the others itself, on its own host, with the same variables.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from consumers.ranks.alarm import Alarm
from consumers.ranks.channel import Channel
from consumers.ranks.children import Children
from consumers.ranks.group import Ranks
from headrace.config import Config
from headrace.config_trainer import check_ranks
from headrace.errors import ConfigError, ServiceError
from headrace.policy.backends import usable_backends
from weightsync.transports.pair import interface_of

START_S = 300.0
"""For all to come: each imports torch first, on a machine that others may use."""
STEP_S = 24 * 3600.0
"""For a collective of a step. Ranks that are gone or silent are found by the alarm."""
ORDER_S = 100 * 365 * 24 * 3600.0
"""For an order: rank 0 may wait for groups as long as it likes."""
DEAD_S = 1.0
"""For the kernel to tell of a child whose connections are closed already."""
LOOK_S = 0.1
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    size: int
    local: int


def join(config: Config, name: str, environ: Mapping[str, str]) -> Ranks:
    """Become one of the ranks that the environment or the configuration asks for, once all are here. Blocks.

    `name` is this process's. Raises ConfigError for ranks or a backend that cannot be, ServiceError when not all come.
    """
    place = _place(environ, config.trainer.ranks)
    if place.size == 1:
        return Ranks()
    _check(config, place)
    backend = _backend(config, place)
    children = None
    if "RANK" in environ:
        store = _given_store(place)
    else:
        store, port = _store()
        children = Children(name, place.size, port)
    # torchrun may keep its store when it starts all ranks again, and with it where dead ones were.
    store = PrefixStore(f"attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    _await_all(store, place, children)
    return _connected(config, name, place, backend, store, children)


def _place(environ: Mapping[str, str], wanted: int) -> _Place:
    if "RANK" not in environ:
        return _Place(0, wanted, 0)
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        return _Place(rank, size, int(environ.get("LOCAL_RANK", rank)))
    except (KeyError, ValueError):
        raise ConfigError(
            f"RANK = {environ['RANK']!r} and WORLD_SIZE = {environ.get('WORLD_SIZE', '')!r} are no numbers as torchrun "
            "sets them; start all ranks by torchrun, or unset both"
        ) from None


def _check(config: Config, place: _Place) -> None:
    try:
        check_ranks(config.trainer, place.size, config.run.placement)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _backend(config: Config, place: _Place) -> str:
    """Raises ConfigError, with what is lacking and the way out."""
    wanted, device = config.trainer.backend, config.model.device
    has = usable_backends()
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu and device not in ("auto", "cuda"):
        raise ConfigError(
            f'model.device = "{device}" is one GPU, and {place.size} ranks need one each; set it to "auto"'
        )
    if on_gpu and place.local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {place.rank} finds no GPU of its own among this host's {torch.cuda.device_count()}; start at most "
            'as many ranks on it (trainer.ranks), or set model.device to "cpu"'
        )
    if wanted == "auto":
        return "nccl" if on_gpu and "nccl" in has else "gloo"
    if wanted == "nccl" and not on_gpu:
        raise ConfigError(
            f'trainer.backend = "nccl" moves tensors between GPUs, and model.device = "{device}" computes on the CPU '
            'here; set the backend to "auto"'
        )
    if wanted not in has:
        lacking = {
            "nccl": "this torch has no NCCL",
            "ucc": "this torch is built without UCC, as all of pip's are, and no module of HEADRACE_TORCH_BACKENDS "
            "registers such a backend",
            "gloo": "this torch is built without gloo",
        }
        raise ConfigError(f'trainer.backend = "{wanted}" cannot be used: {lacking[wanted]}; set it to "auto"')
    return wanted


def _given_store(place: _Place) -> Any:
    """That of torchrun, or of MASTER_ADDR and MASTER_PORT. Raises ServiceError, ConfigError."""
    try:
        return next(iter(rendezvous("env://", place.rank, place.size, timeout=timedelta(seconds=START_S))))[0]
    except ValueError as error:
        raise ConfigError(f"{str(error).splitlines()[0]}; start all ranks by torchrun") from error
    except RuntimeError as error:
        raise ServiceError(f"rank {place.rank} does not reach the others: {str(error).splitlines()[0]}") from error


def _store() -> tuple[Any, int]:
    """On loopback only, where torch itself would listen on all addresses of this host."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    if name := interface_of(LOOPBACK):
        # Else gloo takes the address of this host's name, which need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=START_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _await_all(store: Any, place: _Place, children: Children | None) -> None:
    """Raises ServiceError when one does not come."""
    until = time.monotonic() + START_S
    _here(store, place, 1)
    while (here := _here(store, place, 0)) < place.size:
        if children is not None and (dead := children.dead()):
            raise ServiceError(f"{dead} before it had joined; its last words stand in the log of this trainer")
        if time.monotonic() > until:
            raise ServiceError(f"only {here} of {place.size} ranks came within {START_S:.0f} s; see their logs")
        time.sleep(LOOK_S)


def _here(store: Any, place: _Place, more: int) -> int:
    """How many have come. Raises ServiceError where who keeps the store is gone."""
    try:
        return int(store.add("here", more))
    except RuntimeError as error:
        raise ServiceError(
            f"rank {place.rank} waits for the others, and who keeps count of them is gone: {str(error).splitlines()[0]}"
        ) from error


def _connected(config: Config, name: str, place: _Place, backend: str, store: Any, children: Children | None) -> Ranks:
    silent_s = config.trainer.ranks_silent_s
    try:
        device = torch.device("cuda", place.local) if backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=STEP_S)
        )
        orders, parts, saving, alarm = (
            Channel(dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)), place.rank, place.size)
            for seconds in (ORDER_S, ORDER_S, STEP_S, silent_s)
        )
    except (RuntimeError, ValueError) as error:
        raise ServiceError(
            f"the {place.size} ranks of this trainer do not reach each other by {backend}: {str(error).splitlines()[0]}"
        ) from error

    def dead() -> str:
        return children.dead(DEAD_S) if children is not None else ""

    ranks = Ranks(place.rank, place.size, place.local, children, sharded=config.trainer.parallel == "fsdp")
    ranks.connect(orders, parts, saving, Alarm(alarm, name, silent_s, dead))
    return ranks
