"""The weights of one vLLM server: from one version to the next by its development routes, compared with the staged.

    learn, prepare (it goes on decoding) -> pause -> all answered -> load -> compare -> label -> resume

The pause answers every running request with what it has; it goes on afterwards, with its keys and values computed anew.
The server loads the model folder that the version was staged into, so it must run on this host. How far an update was
when it failed stands in `producers/engines/remote/updating.py`.

What is proven after an update: that the server has a tensor for each of the version's and the other way round; and, by
the SHA-256 that it computes of its own tensors, that those it keeps as they are have the version's bytes. On a CPU vLLM
keeps the matrices of linear layers elsewhere, in a form of its own, and computes nothing of them: those are only known
to have been loaded without an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from headrace.errors import EngineError, WeightError
from producers.engines.openai.client import CompletionsClient
from producers.engines.remote.checksums import ChecksumChecker, Rank, Verify
from producers.engines.remote.forms import Shard, sources
from producers.engines.remote.http import HttpClient, ServerRefused
from producers.engines.remote.staged import Staged
from producers.engines.remote.updating import Way, deadline_s, failing, on_this_host, standing_still
from weightsync.manifest import Layout

log = logging.getLogger(__name__)

ROUTES = (
    "/collective_rpc",
    "/pause",
    "/resume",
    "/is_paused",
    "/weight_info",
    "/update_weight_version",
    "/weight_checker",
)
_EMPTY = hashlib.sha256().hexdigest()
_SHA_64 = 16
"""Hexadecimal digits of a checksum that are compared."""
HEAD = "lm_head.weight"
_SAME = "serve the model that is trained"
_WAY_OUT = (
    'to sample from the weights that it serves, and never train on that, set producer.engine_options.updates = "none"'
)


async def refuse_without_routes(client: HttpClient) -> None:
    """Raises EngineError where the server's weights cannot be updated; or what the client raises."""
    try:
        routes = frozenset((await client.openapi()).get("paths", {}))
    except ServerRefused as error:
        raise EngineError(
            f"whether the weights of {client.url} can be updated cannot be seen: /openapi.json: {error}; start vLLM "
            f"without --disable-fastapi-docs; {_WAY_OUT}"
        ) from error
    if fault := lack(routes, same_host=on_this_host(client.url)):
        raise EngineError(f"the weights of {client.url} cannot be updated: {fault}; {_WAY_OUT}")


def lack(routes: Iterable[str], *, same_host: bool) -> str | None:
    """Why a server with these routes cannot be updated, and the way out; None where it can."""
    missing = [route for route in ROUTES if route not in set(routes)]
    if missing:
        return (
            f"it has no {', '.join(missing)}; start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1 in its environment, "
            "where nobody else reaches it"
        )
    if not same_host:
        return "it runs on another host, and vLLM loads new weights from a folder; run it and its producer on one host"
    return None


class Updater:
    """The updates of one server; one at a time."""

    def __init__(self, client: CompletionsClient, verify: Verify) -> None:
        self._client, self._verify = client, verify
        self._checker: tuple[Layout, ChecksumChecker] | None = None
        self._dirty = False
        """It may have a half of a version: it stays paused until it has a whole one."""

    async def update(
        self, staged: Staged, label: str, answered: Callable[[], Awaitable[None]], *, whole: bool
    ) -> float:
        """Bring a sealed version into the server, under this label. Returns the seconds for which it stood still.

        `answered` waits, once the server is paused, until nothing is open there. `whole` compares all tensors. Raises
        UpdateFailed. One that is cancelled counts as half-way.
        """
        way, client = Way(self._dirty), self._client
        try:
            async with failing(way, f"version {label} did not come into {client.url}", deadline_s(staged.layout)):
                checker = await self._learn(staged.layout)
                await asyncio.to_thread(checker.prepare, staged)
                start = time.perf_counter()
                async with standing_still(way, client.pause, client.resume):
                    await answered()
                    way.touched = True
                    await client.reload_weights(str(staged.folder))
                    if fault := await checker.fault(staged, whole=whole or way.dirty):
                        raise WeightError(f"the server says that it has loaded the version, but {fault}")
                    await client.update_weight_version(label)
                way.arrived()
                return time.perf_counter() - start
        finally:
            self._dirty = way.half_way

    async def _learn(self, layout: Layout) -> ChecksumChecker:
        """What the server's tensors are called, and which can be compared. Raises WeightError for another model."""
        if self._checker is None or self._checker[0] != layout:
            checksums = await self._client.weight_checksums()
            if fault := mismatch(layout, checksums):
                raise WeightError(fault)
            checker = ChecksumChecker(
                layout,
                self._ranks,
                by_rank(checksums),
                device="cpu",
                dtype=layout.tensors[0].dtype,
                sample=self._verify == "sample",
            )
            self._checker = layout, checker
            log.info("weights come to %s by reload_weights; compared: %s", self._client.url, checker.what)
        return self._checker[1]

    async def _ranks(self, skipped: Sequence[str]) -> list[Rank]:
        """The server computes those that are skipped, too."""
        return by_rank(await self._client.weight_checksums())


def named(name: str) -> tuple[int, str]:
    """Tensor-parallel rank and tensor of "dp0:pp0:pcp0:tp1:model.norm.weight"."""
    ranks, _, tensor = name.rpartition(":")
    number = ranks.rpartition(":tp")[2]
    return int(number) if number.isdecimal() else 0, tensor


def by_rank(checksums: Mapping[str, str]) -> list[Rank]:
    """Of each rank, as long as SGLang's. Without those of tensors that are kept elsewhere and have no bytes here."""
    ranks: dict[str, dict[str, str]] = {}
    places: dict[str, int] = {}
    for name, value in checksums.items():
        owner = name.rpartition(":")[0]
        places[owner], tensor = named(name)
        kept = ranks.setdefault(owner, {})
        if value != _EMPTY:
            kept[tensor] = value[:_SHA_64]
    size = max(places.values(), default=0) + 1
    return [Rank(kept, Shard(places[owner], size)) for owner, kept in ranks.items()]


def mismatch(layout: Layout, checksums: Mapping[str, str]) -> str | None:
    """Why a reload would answer success and leave something old, or None: names that only one side has; or a tied head
    on a CPU, of which vLLM keeps a copy in a form of its own that a reload does not renew."""
    known = [spec.name for spec in layout.tensors]
    made_of = {named(name)[1]: sources(named(name)[1], known) for name in checksums}
    loaded = {source for found in made_of.values() for source in found}
    if unfilled := sorted(name for name, found in made_of.items() if not found):
        return f"the version has nothing for {len(unfilled)} of the server's tensors ({unfilled[0]}, …); {_SAME}"
    if left := [name for name in known if name not in loaded]:
        return f"the server has no tensor for {len(left)} of the version's ({left[0]}, …); {_SAME}"
    if _EMPTY in checksums.values() and HEAD not in made_of:
        return (
            "vLLM on a CPU keeps the output head that is tied to the embedding in a copy, which a reload leaves old; "
            "serve this model on a GPU, or with engine sglang"
        )
    return None
