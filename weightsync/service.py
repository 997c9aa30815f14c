"""The weight service: one per host. It checks what is published there, serves it to other hosts, brings what they
publish, frees what nobody needs, and keeps the books.

Wait graph. Producers verify for themselves, and the trainer frees its own segments when it publishes: neither waits
for this service, except producers of a host that versions are brought to, each for at most a second at a time.

    loop      consumes          waits for                                   woken by
    follow    the head pointer  a newer head, at most one block             the trainer's publish
    collect   segments, leases  a newer head, at most a quarter of a lease  `follow`, or time
    importer  versions          see `weightsync/importing.py`               the trainer's announcement or seal
    beat      its own state     a quarter of a lease                        time
    orders    stream `orders`   an order, at most one block                 operator, trainer

`follow` and `orders` notice `stopping` within one block, the others at once. After the loops, however they ended,
`leave` removes the segments that nobody else will: bounded by `ASK_S` and `LEAVE_S`. It waits for the trainer's process
or for readers on its own host, and they for nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import asdict
from typing import Any

from broker.api import Peer, WeightsPort
from headrace.errors import BrokerError, Refused, WeightError, WireError
from headrace.service import Service
from headrace.telemetry.clock import offset, process_began
from headrace.telemetry.journal import Journal, LossyJournal
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane
from headrace.telemetry.recorder import Recorder, so_far
from headrace.version import PolicyVersion
from weightsync.arena import Arena, SegmentName
from weightsync.between import Between
from weightsync.books import Books, Check
from weightsync.checking import first_damage
from weightsync.digests import Pace
from weightsync.leasing import exporter
from weightsync.manifest import Manifest, decode
from weightsync.mirror import Outcome
from weightsync.owners import Owner
from weightsync.retention import Held, freeable
from weightsync.transports import KINDS

log = logging.getLogger(__name__)

ASK_S = 3.0
"""How long a leaving service tries to learn whether the run is over."""
LEAVE_S = 10.0
"""How long a service of a finished run waits for the trainer to unlink its own segments; one that leaves a running run,
for readers of what it brought here."""
CHECK_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class WeightService:
    """The loops of one host, as one loop of a service."""

    def __init__(
        self,
        port: WeightsPort,
        service: Service,
        *,
        name: str,
        run_id: str,
        host: str,
        lease_s: float,
        block_ms: int,
        metrics: Metrics,
        journal: Journal | None = None,
        arena: Arena | None = None,
        between: Between | None = None,
    ) -> None:
        """`between` is what brings weights from other hosts and serves them; without it there is only this one.

        Raises WeightError when there is no folder for segments.
        """
        self.name = name
        self.metrics_url = ""
        self._port = port
        self._service = service
        self._run_id = run_id
        self._host = host
        self._lease_s = lease_s
        self._block_ms = block_ms
        self._metrics = metrics
        self._journal = LossyJournal(journal, metrics, "weights are served")
        self._arena = arena or Arena()
        self._books = Books()
        self._head: PolicyVersion | None = None
        self._head_moved = asyncio.Event()
        self._pinned: set[PolicyVersion] = set()
        self._lane = Lane("verifier", "wait_head")
        self._transfers = Lane("transfer", "wait_version")
        self._lanes = (self._lane, self._transfers)
        for lane in self._lanes:
            lane.backdate(process_began())
        self._recorder = Recorder(journal.write, self._lanes) if journal is not None else None
        self._pace = Pace(0.5)
        self._contact = time.monotonic()
        metrics.watch(*self._lanes)
        self._between = between
        self._importer = None
        self._sent_bytes = 0
        if between is not None:
            self._importer = between.importer(port, service, name, lease_s, block_ms, self._imported, self._transfers)

    async def run(self) -> None:
        """All loops until the service stops or one fails; then `leave`."""
        if self._recorder is not None:
            self._recorder.start()
        try:
            async with asyncio.TaskGroup() as group:
                for loop in (self.follow, self.collect, self.beat, self.orders):
                    group.create_task(self._service.ending_all(loop), name=loop.__name__)
                if self._importer is not None:
                    group.create_task(self._service.ending_all(self._importer.run), name="importer")
        finally:
            if self._between is not None:
                await self._between.close()
            await self.leave()
            if self._recorder is not None:
                self._recorder.close()

    def health(self) -> dict[str, Any]:
        """What `/healthz` shows; not ok once no heartbeat was accepted for two leases."""
        return {
            "ok": time.monotonic() - self._contact < 2 * self._lease_s,
            "service": self.name,
            "head": str(self._head) if self._head else None,
            "stopping": self._service.stopping.is_set(),
            "versions": self._books.as_json(),
        }

    async def follow(self) -> None:
        """Open a page for each new head, and verify once what lies on this host."""
        while not self._service.stopping.is_set():
            head = await self._port.wait_head(self._head, self._block_ms)
            if head is None or head == self._head:
                continue
            self._head = head
            self._head_moved.set()
            data = await self._port.manifest(head)
            if data is None:
                continue
            try:
                manifest = decode(data)
            except WireError as error:
                self._metrics.count("weights_refused_manifests", help="Manifests that are not valid")
                self._write("refused", version=str(head), reason=str(error))
                continue
            await self._check(manifest)

    async def collect(self) -> None:
        """Free what no lease and no head needs, as often as the head moves and at least at a quarter of a lease."""
        while not self._service.stopping.is_set():
            self._head_moved.clear()
            await self.collect_once()
            await self._wait_for_head(self._lease_s / 4)

    async def collect_once(self) -> list[SegmentName]:
        """One round; returns the segments that were freed."""
        names = self._arena.segments(self._run_id)
        # The head last: where Redis is emptied in between there is none, and nothing is freed.
        pinned, leased, head = await self._port.pinned(), await self._port.leased(), await self._port.head()
        self._pinned = pinned
        coming = self._between.mirror.needed() if self._between else set()
        held = [Held(str(name), name.version, self._arena.lives(name)) for name in names]
        going = {item.name for item in freeable(held, head, leased.keys() | pinned | coming)}
        freed = [name for name in names if str(name) in going and await asyncio.to_thread(self._arena.remove, name)]
        staying = {name.version for name in names if str(name) not in going}
        for name in freed:
            self._write("freed", version=str(name.version), segment=str(name), owner_alive=self._arena.lives(name))
        # Whose manifests go: of what was published here.
        ours = {name.version for name in freed if self._published_here(name)}
        gone = ours | set(self._books.unfreed(self._host))
        for version in sorted(gone - staying - leased.keys() - pinned):
            # What was begun since the head was asked is not among the names.
            if head is not None and version < head:
                await self._port.forget(version)
                self._books.freed(version)
        for orphan in self._arena.sweep(keep_run=self._run_id):
            self._write("orphan", segment=str(orphan))
        self._books.observe(leased, await self._port.peers())
        self._metrics.count("weights_freed", len(freed), help="Segments freed by this service")
        self._metrics.gauge("weights_segments", len(staying), help="Segments of this run on this host")
        return freed

    async def beat(self) -> None:
        """Say that this service lives."""
        while True:
            await self._beat_once()
            if await self._service.sleep(self._lease_s / 4):
                return

    async def orders(self) -> None:
        """End with the run, or when told to by name."""
        after = "$"
        while not self._service.stopping.is_set():
            for order in await self._port.orders(after, self._block_ms):
                after = order.order_id
                if order.target in ("", self.name) and order.kind in ("end", "stop"):
                    self._service.stop(f"order {order.kind}: {order.reason}" if order.reason else f"order {order.kind}")

    async def leave(self) -> None:
        """After the loops: remove what nobody else will.

        Of a running run, what a living trainer of this host holds is kept, and what is pinned. What was brought here
        goes, since nobody would free it any more: once it is read no longer, or stays where that takes too long.
        """
        over = await self._over()
        read: set[PolicyVersion] = set()
        if over:
            await self._await_trainer()
        elif over is False:
            read = await self._await_readers()
        for name in self._arena.segments(self._run_id):
            needed = name.version in read if self._brought(name) else self._arena.lives(name)
            kept = needed or name.version in self._pinned
            if (over or not kept) and await asyncio.to_thread(self._arena.remove, name):
                self._write("freed", version=str(name.version), segment=str(name), owner_alive=self._arena.lives(name))

    async def _over(self) -> bool | None:
        """Say goodbye, and learn whether the run is over; None where that is not known."""
        try:
            async with asyncio.timeout(ASK_S):
                await self._port.retire(self.name)
                return (await self._port.state()).status != "running"
        except Refused:
            # The run was deleted.
            return True
        except (BrokerError, TimeoutError) as error:
            log.warning(
                "only what dead trainers left and what was brought here is removed, the run's state is not known: %s",
                error or "no answer",
            )
            return None

    async def _await_readers(self) -> set[PolicyVersion]:
        """Wait until nobody on this host reads what was brought here, at most `LEAVE_S`; returns what is still read."""
        brought = {name.version for name in self._arena.segments(self._run_id) if self._brought(name)}
        read: set[PolicyVersion] = set()
        try:
            async with asyncio.timeout(LEAVE_S):
                # Leases lapse by themselves: nobody says so.
                while brought and (read := brought & await self._read_here()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            log.warning("left in this host's memory, as they are still read: %s", ", ".join(map(str, sorted(read))))
        except BrokerError as error:
            log.warning("what was brought here is removed, who reads it is not known: %s", error)
            return set()
        return read

    async def _read_here(self) -> set[PolicyVersion]:
        """Versions that a process of this host has a lease on, an export's among them."""
        leased, peers = await self._port.leased(), await self._port.peers()
        here = {peer.name for peer in peers if peer.alive and peer.host == self._host}
        exports = exporter(self._host, "")
        return {
            version
            for version, holders in leased.items()
            if any(holder in here or holder.startswith(exports) for holder in holders)
        }

    def _brought(self, name: SegmentName) -> bool:
        """By this service, from another host."""
        return name.owner == Owner.this() and not self._published_here(name)

    def _published_here(self, name: SegmentName) -> bool:
        """Not brought from another host, as far as is known."""
        host = self._books.host(name.version)
        return host == self._host if host is not None else name.owner != Owner.this()

    async def _await_trainer(self) -> None:
        """The trainer unlinks its segments itself when it closes; wait for that, at most `LEAVE_S`."""
        until = time.monotonic() + LEAVE_S
        # Files of another process: nothing wakes us when it unlinks them.
        while time.monotonic() < until and any(  # noqa: ASYNC110
            self._arena.lives(name) and name.owner != Owner.this() for name in self._arena.segments(self._run_id)
        ):
            await asyncio.sleep(0.05)

    async def _check(self, manifest: Manifest) -> None:
        version = manifest.version
        self._books.open(version, manifest.parts[0].host, manifest.layout.nbytes, manifest.sealed_s)
        start = time.perf_counter()
        with self._lane.during("verify"):
            check, reason = await asyncio.to_thread(self._verify, manifest)
        seconds = time.perf_counter() - start
        self._books.checked(version, check, seconds)
        self._metrics.count("weights_versions", help="Heads seen, by what verifying them said", check=check)
        self._metrics.gauge("weights_head_step", version.step, help="Step of the newest head seen")
        self._metrics.observe(
            "weights_check_seconds", seconds, buckets=CHECK_SECONDS, help="Seconds to verify a version"
        )
        self._write(
            "sealed", version=str(version), host=manifest.parts[0].host, nbytes=manifest.layout.nbytes, check=check,
            check_s=round(seconds, 4), seen_after_s=round(time.time() - manifest.sealed_s - seconds, 4), reason=reason,
        )  # fmt: skip
        if check == "damaged":
            log.error("weight version %s is damaged on this host: %s", version, reason)

    def _verify(self, manifest: Manifest) -> tuple[Check, str]:
        """Whether the segment on this host holds what the trainer digested. In a thread, which also unmaps it."""
        checks: list[Check] = []
        for part, theirs in enumerate(manifest.parts):
            if theirs.host != self._host:
                checks.append("elsewhere")
                continue
            try:
                segment = self._arena.open(theirs.segment, manifest.layout, part)
            except WeightError as error:
                return "damaged", str(error)
            if segment is None:
                return "vanished", ""
            try:
                damage = first_damage(segment, manifest, part, self._pace)
            except WeightError as error:
                # Somebody has cut it since it was opened.
                damage = str(error)
            finally:
                segment.close()
            if damage:
                return "damaged", damage
            checks.append("verified")
        return ("verified" if "verified" in checks else "elsewhere"), ""

    async def _beat_once(self) -> None:
        names = self._arena.segments(self._run_id)
        page = self._books.page(self._head) if self._head else None
        if self._between is not None:
            await self._between.refresh(self._port)
            self._count_sent(self._between)
        if self._importer is not None:
            await self._importer.keep_base()
        state = {
            "head": str(self._head) if self._head else None,
            "check": page.check if page else None,
            "segments": len(names),
            "event_loop_lag_s": round(self._service.event_loop_lag_s, 4),
            "metrics_url": self.metrics_url,
            "troubles": self._journal.troubles(),
            **(self._between.state() if self._between else {}),
            **({"lanes": so_far(self._lanes)} if self._recorder is None else {}),
        }
        await self._port.heartbeat(Peer(self.name, "weights", self._host, os.getpid(), True, state), self._lease_s)
        self._contact = time.monotonic()
        self._write("clock", **await offset(self._port.now_ms))
        self._metrics.gauge("event_loop_lag_seconds", self._service.event_loop_lag_s, help="How late it woke up last")
        if (status := (await self._port.state()).status) in ("finished", "failed"):
            self._service.stop(f"the run is {status}")

    async def _wait_for_head(self, seconds: float) -> None:
        """Until `follow` sees a newer head or the service stops, at most `seconds`."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._head_moved, self._service.stopping)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _count_sent(self, between: Between) -> None:
        sent = between.server.stats()
        self._metrics.count(
            "weights_sent_bytes", sent.sent_bytes - self._sent_bytes, help="Bytes that went to other hosts"
        )
        self._sent_bytes = sent.sent_bytes
        self._metrics.gauge("weights_uploads", between.server.uploads, help="Hosts that take weights from here now")

    def _imported(self, outcome: Outcome) -> None:
        self._metrics.count(
            "weights_imports", help="Versions of other hosts, by how bringing them ended", kind=outcome.kind
        )
        begin = round(outcome.ended_at - outcome.seconds, 6)
        said = {**asdict(outcome), "version": str(outcome.version), "begin": begin, "end": outcome.ended_at}
        self._write("imported", **said)
        for known in KINDS:
            self._metrics.gauge(
                "weight_transport", known == outcome.transport, help="1 for how weights come here", kind=known
            )
        for kind, nbytes in (("full", outcome.full_bytes), ("delta", outcome.delta_bytes)):
            self._metrics.count("weights_imported_bytes", nbytes, help="Bytes that came from other hosts", kind=kind)
        if outcome.kind == "held" and outcome.nbytes:
            self._books.imported(outcome.version, outcome.seconds)
            self._metrics.observe(
                "weights_import_seconds", outcome.seconds, buckets=CHECK_SECONDS, help="Seconds to bring a version"
            )

    def _write(self, event: str, **fields: Any) -> None:
        self._journal.write(event, **fields)
