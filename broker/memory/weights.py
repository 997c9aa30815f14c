"""Weight versions of a run in memory."""

from __future__ import annotations

from broker.api import Fence, Reign, Versions
from broker.bounds import MAX_MANIFESTS, MAX_PINS, MAX_REIGNS
from broker.memory.service import MemoryService
from broker.memory.store import now_ms
from broker.pins import too_many_pins
from headrace.version import PolicyVersion


class MemoryWeights(MemoryService):
    """WeightsPort in memory."""

    async def publish_head(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        store = self.fenced(fence)
        self._keep(version, manifest)
        reign = store.reigns.get(version.incarnation, Reign(version.step, version.step))
        store.reigns[version.incarnation] = Reign(min(reign.first, version.step), max(reign.newest, version.step))
        if len(store.reigns) > MAX_REIGNS:
            del store.reigns[min(store.reigns)]
        if store.head is None or version > store.head:
            store.head = version
            store.coming = max(version, store.coming or version)
            store.wake()

    async def announce(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        store = self.fenced(fence)
        self._keep(version, manifest)
        if store.coming is None or version > store.coming:
            store.coming = version
            store.wake()

    async def secret(self) -> bytes:
        return self.store.secret

    async def head(self) -> PolicyVersion | None:
        return self.store.head

    async def wait_versions(self, seen: Versions, block_ms: int) -> Versions:
        store = self.store
        await store.wait(lambda: Versions(store.head, store.coming) != seen, block_ms)
        return Versions(store.head, store.coming)

    async def wait_head(self, after: PolicyVersion | None, block_ms: int) -> PolicyVersion | None:
        store = self.store

        def newer() -> bool:
            return store.head is not None and (after is None or store.head > after)

        await store.wait(newer, block_ms)
        return self.store.head

    async def manifest(self, version: PolicyVersion) -> bytes | None:
        return self.store.manifests.get(version)

    async def versions(self) -> set[PolicyVersion]:
        return set(self.store.manifests)

    async def lease(self, version: PolicyVersion, holder: str, lease_s: float) -> None:
        store, now = self.store, now_ms()
        store.leases = {held: end for held, end in store.leases.items() if end > now}
        store.leases[version, holder] = now + max(1, round(lease_s * 1000))

    async def release(self, version: PolicyVersion, holder: str) -> None:
        self.store.leases.pop((version, holder), None)

    async def leased(self) -> dict[PolicyVersion, list[str]]:
        store, now = self.store, now_ms()
        found: dict[PolicyVersion, list[str]] = {}
        for (version, holder), end in sorted(store.leases.items()):
            if end > now:
                found.setdefault(version, []).append(holder)
        return found

    async def pin(self, version: PolicyVersion) -> None:
        if len(self.store.pins | {version}) > MAX_PINS:
            raise too_many_pins()
        self.store.pins.add(version)

    async def unpin(self, version: PolicyVersion) -> bool:
        there = version in self.store.pins
        self.store.pins.discard(version)
        return there

    async def pinned(self) -> set[PolicyVersion]:
        return set(self.store.pins)

    async def forget(self, version: PolicyVersion) -> None:
        self.store.manifests.pop(version, None)

    def _keep(self, version: PolicyVersion, manifest: bytes) -> None:
        manifests = self.store.manifests
        manifests[version] = manifest
        if len(manifests) > MAX_MANIFESTS:
            del manifests[min(manifests)]
