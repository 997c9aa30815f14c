"""Orders to the services of a run, and waiting for what came of them."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from broker.api import OperatorPort, Order, Peer
from deploy.connections import local_connection, open_operator, runs_folder, told_url
from deploy.run_folder import Connection, RunFolder
from headrace.errors import BrokerError, BrokerUnavailable, ServiceError, WeightError
from headrace.version import PolicyVersion

LOOK_S = 0.2
SCALE_S = 240.0
"""Longer than a launcher takes to answer, whatever happens."""
ROLLBACK_S = 900.0
"""A trainer answers between two steps, once a checkpoint contains the rollback; it may evaluate first."""


async def scale(run: str | None, count: int) -> str:
    """Ask the launcher for `count` producers; returns what it says happened. Raises ServiceError when it does not."""
    async with open_operator(run) as (run_id, operator):
        launcher = await _needed(
            operator,
            "launcher",
            f"run {run_id} has no launcher that could start producers; start one by hand with `python -m "
            "producers`, or in containers with `docker compose up -d --scale producer=N`",
        )
        order = Order("", "scale", target="producer", count=count, reason=_mark())
        return str(await _answer(run_id, operator, order, launcher, SCALE_S))


async def rollback(run: str | None, version: PolicyVersion) -> str:
    """Ask the trainer to take an earlier version's weights back; returns a sentence with what they are now.

    Raises WeightError with its reason when it does not, ServiceError when it does not answer.
    """
    async with open_operator(run) as (run_id, operator):
        trainer = await _needed(
            operator, "trainer", f"run {run_id} has no trainer that could roll back; `headrace up --resume` starts one"
        )
        order = Order("", "rollback", target=str(version), reason=_mark())
        answer = await _answer(run_id, operator, order, trainer, ROLLBACK_S)
        if "refused" in answer:
            raise WeightError(f"run {run_id} does not go back to weight version {version}: {answer['refused']}")
        return f"weight version {answer['version']} of run {run_id} has the weights of {version}, and training goes on"


async def _answer(run_id: str, operator: OperatorPort, order: Order, asked: Peer, patience_s: float) -> Any:
    """What this service answers to the order under its mark. Raises ServiceError when it does not."""
    await operator.order(order)
    answer: Any = None

    async def answered() -> bool:
        nonlocal answer
        peer = await _alive(operator, asked.role)
        if peer is None or (peer.host, peer.pid) != (asked.host, asked.pid):
            raise ServiceError(
                f"the {asked.role} of run {run_id} went away before it had answered; look at `headrace status`"
            )
        answer = peer.state.get("answers", {}).get(order.reason)
        return bool(answer)

    if not await _until(answered, patience_s):
        raise ServiceError(f"the {asked.role} of run {run_id} did not answer within {patience_s:.0f} s")
    return answer


def _mark() -> str:
    return f"asked by process {os.getpid()} of {socket.gethostname()}, {secrets.token_hex(3)}"


async def stop(run: str | None, patience_s: float) -> str:
    """End a run: ask, wait, then force. Returns what happened."""
    if told_url():
        return await _stop_remote(run, patience_s)
    connection = local_connection(run)
    folder = RunFolder(runs_folder() / connection.run_id)
    try:
        await _order_stop(connection.run_id)
    except BrokerError:
        # A broker that does not answer is one more reason to stop: the launcher still hears signals.
        os.kill(connection.launcher_pid, signal.SIGTERM)

    async def gone() -> bool:
        return not folder.live

    if await _until(gone, patience_s):
        return f"run {connection.run_id} stopped"
    return await _force(connection, gone)


async def _force(connection: Connection, gone: Callable[[], Awaitable[bool]]) -> str:
    """Two signals end a launcher at once; when even that does not help, the kernel ends it and its children."""
    for _ in range(2):
        _signal(connection.launcher_pid, signal.SIGTERM)
        await asyncio.sleep(LOOK_S)
    if await _until(gone, 20.0):
        return f"run {connection.run_id} stopped, by force"
    _signal(connection.launcher_pid, signal.SIGKILL)
    if await _until(gone, 5.0):
        return f"run {connection.run_id} killed"
    raise ServiceError(f"process {connection.launcher_pid} of run {connection.run_id} does not end")


async def _stop_remote(run: str | None, patience_s: float) -> str:
    """Ask every service of a run in a shared broker to leave, and wait until none is alive."""
    async with open_operator(run) as (run_id, operator):
        # A launcher stops its services in their order, and knows of no others: those hear it once it has left.
        all_told = await _alive(operator, "launcher") is None
        await operator.order(_stop_order("" if all_told else "launcher"))
        left: list[Peer] = []

        async def alone() -> bool:
            nonlocal left, all_told
            left = [peer for peer in await operator.peers() if peer.alive]
            if not all_told and left and not any(peer.role == "launcher" for peer in left):
                await operator.order(_stop_order(""))
                all_told = True
            return not left

        if not await _until(alone, patience_s):
            names = ", ".join(f"{peer.name} (process {peer.pid} on {peer.host})" for peer in left)
            raise ServiceError(f"after {patience_s:.0f} s these still run: {names}")
        return f"run {run_id} stopped"


async def _order_stop(run_id: str) -> None:
    async with open_operator(run_id) as (_, operator):
        await operator.order(_stop_order("launcher"))


def _stop_order(target: str) -> Order:
    return Order("", "stop", target=target, reason="headrace stop")


async def _needed(operator: OperatorPort, role: str, without: str) -> Peer:
    """The one that lives. Raises ServiceError with the sentence `without`, BrokerUnavailable where nobody is seen."""
    found = await _alive(operator, role)
    if found is not None:
        return found
    if refusal := await operator.refusal():
        raise BrokerUnavailable(f"{refusal}, and nobody can be seen meanwhile; make room, then try again")
    raise ServiceError(without)


async def _alive(operator: OperatorPort, role: str) -> Peer | None:
    return next((peer for peer in await operator.peers() if peer.role == role and peer.alive), None)


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Look until it holds, `seconds` at most."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
