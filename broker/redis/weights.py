"""The head pointer, manifests and leases of weight versions."""

from __future__ import annotations

from broker.api import Fence, Reign
from broker.bounds import MAX_HEADS, MAX_MANIFESTS, MAX_REIGNS
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

    async def head(self) -> PolicyVersion | None:
        return _version(await self._link.send("HGET", self._link.keys.of("state"), "head"))

    async def wait_head(self, after: PolicyVersion | None, block_ms: int) -> PolicyVersion | None:
        stream = self._link.keys.of("heads")
        # The place in the stream first, then the head: a notification between the two is not missed.
        newest, raw = await self._link.pipeline(
            ("XREVRANGE", stream, "+", "-", "COUNT", 1), ("HGET", self._link.keys.of("state"), "head")
        )
        head = _version(raw)
        if block_ms < 1 or (head is not None and (after is None or head > after)):
            return head
        place = text(newest[0][0]) if newest else "0"
        await self._link.send("XREAD", "COUNT", 1, "BLOCK", self._link.block_ms(block_ms), "STREAMS", stream, place)
        return await self.head()

    async def manifest(self, version: PolicyVersion) -> bytes | None:
        raw: bytes | None = await self._link.send("HGET", self._link.keys.of("manifests"), str(version))
        return raw

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

    async def forget(self, version: PolicyVersion) -> None:
        await self._link.send("HDEL", self._link.keys.of("manifests"), str(version))


def _version(raw: bytes | None) -> PolicyVersion | None:
    return None if raw is None else PolicyVersion.parse(text(raw))
