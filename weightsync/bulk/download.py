"""One part of a version, chunk after chunk, from whoever has it. Blocking.

Wait graph. A fetch waits for the network only, and gives up each wait: a connection after `connect_s`, a proof after
HANDSHAKE_S, the next byte after `stall_s` (a server says "not yet" within a second). Then the next parent is tried;
when there is none the origin is asked for others, `ASKS` times, and then the fetch returns without a chunk. `cancel`
ends each of these waits at once.
"""

from __future__ import annotations

import logging
import time

from headrace.errors import WeightError, WireError
from weightsync.bulk.client import Cancellation, Connection
from weightsync.bulk.deltas import Delta, Key, apply_to, decode_runs, digest_of_runs, runs_between, runs_of
from weightsync.bulk.frames import Change, Codec, Get, Header, Status, header_fault
from weightsync.bulk.parents import Downloads, Parents
from weightsync.digests import Pace, digest_of
from weightsync.manifest import Manifest
from weightsync.placement import Placement
from weightsync.transports.api import Base, Unavailable

log = logging.getLogger(__name__)

ROUND_S = 1.0
"""A fetch that has a chunk returns after this time."""
LAG_S = 15.0
"""A relay that has not had the next chunk for so long counts as failed."""
SOON_S = 0.02
AGAIN_S = 0.05
"""Rest of a fetch that found nobody, so that asking again at once is harmless."""


class _WrongBase(Exception):
    """A delta came whole, and does not fit the base that is here."""


class Download:
    """For one thread at a time; `cancel` is for any."""

    def __init__(self, shared: Downloads, manifest: Manifest, part: int, base: Base | None) -> None:
        self._shared = shared
        self._manifest = manifest
        self._part = part
        self._base = base
        self._runs = b""
        self._marks: list[tuple[int, str]] = []
        self._change: Change | None = None
        """As what the parent was asked to send."""
        self._expected = manifest.parts[part].digests if manifest.sealed else None
        self._cancellation = Cancellation()
        self._parents = Parents(shared, manifest.version, part, manifest.parts[part].host, self._cancellation)
        self._parent: Connection | None = None
        self._next: int | None = None
        """The chunk that the parent sends next; None where it was not asked for any."""
        self._end = 0
        """Of the chunks that it was asked for."""
        self._after = 0
        """Where the fetch before ended."""
        self._ended = time.monotonic()
        """When the fetch before ended."""
        self._dropped = False
        """Whether the parent may have dropped us since nobody read."""
        self._lagging: float | None = None
        """Since when the parent has not had the next chunk."""
        self._left = set(range(manifest.layout.chunks(part)))

    def begin(self) -> None:
        """Before each fetch, by who may cancel it: from here on `cancel` means that one."""
        self._cancellation.clear()

    def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        """As `Source.fetch`."""
        if self._cancellation.asked:
            return []
        self._parents.begin(self._parent.address if self._parent else "")
        # Who reads on gets what comes next without asking each time.
        end = len(out.bounds) if chunks.start == self._after else chunks.stop
        now = time.monotonic()
        until, self._dropped = now + ROUND_S, now - self._ended > self._shared.stall_s / 2
        digests: list[bytes] = []
        while len(digests) < len(chunks) and (not digests or (time.monotonic() < until and not self._late())):
            digest = self._chunk(chunks.start + len(digests), end, out, pace)
            if digest is None:
                break
            digests.append(digest)
        self._ended, self._after = time.monotonic(), chunks.start + len(digests)
        self._left.difference_update(range(chunks.start, self._after))
        reason = None if digests else self._parents.nothing()
        return digests if reason is None else Unavailable(reason)

    def cancel(self) -> None:
        """The fetch under way returns soon; what it had to fill is undefined."""
        self._cancellation.ask()

    def close(self) -> None:
        """No fetch is under way."""
        if self._parent is not None:
            self._let_go()
        self._cancellation.clear()
        self._parents.done(holds=not self._left)

    def _chunk(self, at: int, end: int, out: Placement, pace: Pace) -> bytes | None:
        """The digest of the chunk, once it is in its place; None when nobody has it now."""
        while not self._cancellation.asked:
            parent = self._parent or self._parents.next()
            if parent is None:
                self._cancellation.rest(AGAIN_S)
                return None
            self._parent = self._cancellation.use(parent)
            try:
                header = self._header(parent, at, end)
                if header.status is Status.CHUNK:
                    return self._take(parent, header, at, out, pace)
                if not self._goes_on(parent, header.status):
                    return None
            except _WrongBase as error:
                log.warning("weight version %s: chunk %d is fetched in full: %s", self._manifest.version, at, error)
                self._base = None
                self._parents.again(parent.address)
                self._drop()
            except WireError as error:
                self._shared.standing.bad(parent.address, time.monotonic())
                self._shared.count(bad_chunks=1)
                self._fail(str(error))
            except OSError as error:
                self._fail(str(error))
        return None

    def _late(self) -> bool:
        """Whether the next chunk is not on its way: what came before it is told first."""
        return self._parent is not None and self._next is not None and not self._parent.comes(SOON_S)

    def _header(self, parent: Connection, at: int, end: int) -> Header:
        """Of the reply that should bring this chunk. Raises OSError, WireError."""
        if self._next not in (None, at):
            raise ConnectionError("it was asked for other chunks")
        if self._next is None:
            layout = self._manifest.layout
            nbytes = layout.part_nbytes(self._part)
            self._change = self._wanted(parent.address, nbytes)
            parent.ask(Get(self._manifest.version, self._part, nbytes, layout.chunk_bytes, at, end, self._change))
            self._next, self._end = at, end
        return parent.header()

    def _wanted(self, address: str, nbytes: int) -> Change | None:
        """How the parent should send it: the difference from the base, or in full (None)."""
        codec = self._shared.codec
        if self._base is None or codec == "raw" or self._shared.same_host(self._manifest.parts[self._part].host):
            return None
        if codec == "auto" and not self._shared.standing.delta_pays(address, nbytes):
            return None
        if not self._runs:
            self._runs = runs_of(self._manifest.layout, self._part)
            self._marks = decode_runs(self._runs) if self._runs else []
        how = Codec.SPARSE_ABS if codec == "sparse-abs" else Codec.SPARSE_ULP
        return Change(self._base.version, how, self._runs) if self._runs else None

    def _take(self, parent: Connection, header: Header, at: int, out: Placement, pace: Pace) -> bytes:
        """Raises OSError, WireError for a chunk that does not match, _WrongBase for a delta that does not fit."""
        first, last = out.bounds[at]
        if fault := header_fault(header, at, last - first, self._change):
            raise WireError(fault)
        expected = header.digest if self._expected is None else self._expected[at]
        if header.digest != expected:
            raise WireError(f"chunk {at} is not what the manifest says")
        if header.codec is Codec.RAW:
            start = time.perf_counter()
            digest = parent.read(out.views(at), pace)
            self._shared.standing.sent(parent.address, header.nbytes, time.perf_counter() - start)
            self._shared.count(full_bytes=header.nbytes)
            if digest != expected:
                raise WireError(f"chunk {at} was damaged on the way")
        else:
            self._take_delta(parent, header, at, out, pace)
        self._parents.heard()
        self._lagging = None
        self._next = at + 1 if at + 1 < self._end else None
        return expected

    def _take_delta(self, parent: Connection, header: Header, at: int, out: Placement, pace: Pace) -> None:
        assert self._base is not None
        wire = memoryview(bytearray(header.wire_nbytes))
        if parent.read([wire], pace) != header.wire_digest:
            raise WireError(f"the delta of chunk {at} was damaged on the way")
        self._shared.count(delta_bytes=header.wire_nbytes, delta_chunks=1)
        pace.start()
        start = time.perf_counter()
        runs = runs_between(self._marks, *out.bounds[at])
        views = out.views(at)
        try:
            apply_to(self._base, self._part, at, header.codec, wire, runs, views)
        except (WireError, WeightError) as error:
            raise _WrongBase(str(error)) from error
        if digest_of(views) != header.digest:
            raise _WrongBase(f"it is not what version {self._base.version} is changed to")
        seconds = time.perf_counter() - start
        pace.rest()
        if self._shared.deltas is not None:
            key = Key(
                self._manifest.version, self._base.version, self._part, at, header.codec, digest_of_runs(self._runs)
            )
            self._shared.deltas.put(key, Delta(bytes(wire), header.wire_digest, 0.0))
        self._shared.standing.changed(
            parent.address, header.nbytes, header.wire_nbytes, header.encode_us / 1e6, seconds
        )  # fmt: skip

    def _goes_on(self, parent: Connection, status: Status) -> bool:
        """After a reply that is no chunk: whether to look for another parent now."""
        self._next = None
        if status is Status.NOT_YET:
            self._parents.heard()
            now = time.monotonic()
            self._lagging = self._lagging or now
            if parent.address == self._parents.origin or now - self._lagging < LAG_S:
                return False
            self._fail(f"it has not gone on for {LAG_S:g} s")
        elif status is Status.BUSY:
            self._parents.heard()
            self._let_go()
        elif status is Status.GONE:
            self._parents.gone(parent.address)
            self._let_go()
        else:
            raise WireError(f"a request for chunks is answered {status.name}")
        return True

    def _fail(self, reason: str) -> None:
        assert self._parent is not None
        if self._dropped:
            self._dropped = False
            self._parents.again(self._parent.address)
        else:
            self._parents.failed(self._parent.address, reason)
        self._drop()

    def _drop(self) -> None:
        """The parent's connection, in which what was asked for may still come."""
        self._next = -1
        self._let_go()

    def _let_go(self) -> None:
        """Of the parent; its connection is kept when nothing is left in it."""
        assert self._parent is not None
        if self._next is None:
            self._shared.give_back(self._parent)
        else:
            self._parent.close()
        self._parent = self._next = self._lagging = None
