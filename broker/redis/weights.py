"""The head pointer, manifests and leases of weight versions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from broker.api import Fence, Reign, Versions
from broker.bounds import MAX_HEADS, MAX_MANIFESTS, MAX_PINS, MAX_REIGNS, SECRET_BYTES
from broker.pins import too_many_pins
from broker.redis.link import text
from broker.redis.service import RedisService, milliseconds
from headrace.version import PolicyVersion


class RedisWeights(RedisService):
    """WeightsPort on Redis."""

    async def publish_head(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        # Known before it is there: a group of this version cannot come earlier.
        self._link.published(version.incarnation, Reign(version.step, version.step))
        bounds = MAX_HEADS, MAX_REIGNS, MAX_MANIFESTS
        await self._link.script("publish_head", version.incarnation, version.step, manifest, *bounds, fence=fence)

    async def announce(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        await self._link.script("announce", str(version), manifest, MAX_HEADS, fence=fence)

    async def secret(self) -> bytes:
        made = await self._link.script("secret", secrets.token_bytes(SECRET_BYTES))
        return bytes(made)

    async def head(self) -> PolicyVersion | None:
        return _version(await self._link.send("HGET", self._link.keys.of("state"), "head"))

    async def wait_versions(self, seen: Versions, block_ms: int) -> Versions:
        stream = self._link.keys.of("heads")
        # The place in the stream first, then the versions: a notification between the two is not missed.
        newest, found = await self._link.pipeline(("XREVRANGE", stream, "+", "-", "COUNT", 1), self._ask_versions())
        versions = _versions(found)
        if block_ms < 1 or versions != seen:
            return versions
        place = text(newest[0][0]) if newest else "0"
        await self._link.send("XREAD", "COUNT", 1, "BLOCK", self._link.block_ms(block_ms), "STREAMS", stream, place)
        return _versions(await self._link.send(*self._ask_versions()))

    async def wait_head(self, after: PolicyVersion | None, block_ms: int) -> PolicyVersion | None:
        end = time.monotonic() + block_ms / 1000
        seen = Versions()
        while True:
            left_ms = max(0, round(1000 * (end - time.monotonic())))
            seen = await self.wait_versions(seen, left_ms)
            if left_ms == 0 or (seen.head is not None and (after is None or seen.head > after)):
                return seen.head

    def _ask_versions(self) -> tuple[str, ...]:
        return "HMGET", self._link.keys.of("state"), "head", "coming"

    async def manifest(self, version: PolicyVersion) -> bytes | None:
        raw: bytes | None = await self._link.send("HGET", self._link.keys.of("manifests"), str(version))
        return raw

    async def versions(self) -> set[PolicyVersion]:
        names = await self._link.send("HKEYS", self._link.keys.of("manifests"))
        return {PolicyVersion.parse(text(name)) for name in names}

    async def lease(self, version: PolicyVersion, holder: str, lease_s: float) -> None:
        await self._link.script("lease", f"{version} {holder}", milliseconds(lease_s))

    async def release(self, version: PolicyVersion, holder: str) -> None:
        await self._link.send("ZREM", self._link.keys.of("leases"), f"{version} {holder}")

    async def leased(self) -> dict[PolicyVersion, list[str]]:
        leases: dict[PolicyVersion, list[str]] = {}
        for raw in await self._link.script("leased"):
            version, _, holder = text(raw).partition(" ")
            leases.setdefault(PolicyVersion.parse(version), []).append(holder)
        return {version: sorted(holders) for version, holders in leases.items()}

    async def pin(self, version: PolicyVersion) -> None:
        if not await self._link.script("pin", str(version), MAX_PINS):
            raise too_many_pins()
        self._link.pins.add(version)

    async def unpin(self, version: PolicyVersion) -> bool:
        self._link.pins.discard(version)
        return bool(await self._link.send("HDEL", self._link.keys.of("pins"), str(version)))

    async def pinned(self) -> set[PolicyVersion]:
        return {PolicyVersion.parse(text(raw)) for raw in await self._link.send("HKEYS", self._link.keys.of("pins"))}

    async def forget(self, version: PolicyVersion) -> None:
        await self._link.send("HDEL", self._link.keys.of("manifests"), str(version))


def _versions(raw: Sequence[bytes | None]) -> Versions:
    head, coming = map(_version, raw)
    return Versions(head, coming)


def _version(raw: bytes | None) -> PolicyVersion | None:
    return None if raw is None else PolicyVersion.parse(text(raw))
