"""Entries that nobody should have written: damaged, forged, foreign, too large. Each must cost nothing but itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from broker.codec import decode_task, encode_group, encode_task
from broker.keys import Keys
from broker.messages import Group, Task, VersionSpan
from headrace.errors import WireError
from headrace.version import PolicyVersion
from tests.chaos.world import World
from tests.support import make_group, make_task

HUGE = 3 << 20
"""Bytes of an entry that is too large to be a group of this run."""
VOCABULARY = 100

Fields = dict[str, Any]


async def forge(world: World) -> None:
    """Several such entries, some under the name of a task that is outstanding now."""
    keys = Keys(world.record.run_id)
    async with world.server.client() as client:
        for _ in range(world.random.randint(1, 4)):
            task = await _outstanding(client, keys, world.random)
            stream, what, fields = forged(world.random, task)
            world.log("forged", stream=stream, what=what, task=task.task_id)
            await client.xadd(keys.of(stream), fields)


async def _outstanding(client: Any, keys: Keys, generator: random.Random) -> Task:
    """A task that a producer plays or that waits for one; one that never was where there is none."""
    entries = await client.xrange(keys.of("tasks"), count=100)
    if not entries or generator.random() < 0.3:
        return make_task("forged")
    try:
        return decode_task(generator.choice(entries)[1][b"body"])
    except WireError:
        return make_task("forged")


def forged(generator: random.Random, task: Task) -> tuple[str, str, Fields]:
    """Stream, what is wrong with it, and the entry. Pure."""
    if generator.random() < 0.2:
        body = encode_task(task)
        what, body = generator.choice(
            [("no task", b"\xc1 no task"), ("half a task", body[: len(body) // 2]), ("a second entry", body)]
        )
        return "tasks", what, {"task": task.task_id, "attempt": "0", "kind": task.kind, "body": body}
    attempt = generator.randint(1, 3)
    group = make_group(task, attempt, "a stranger", seed=generator.randrange(1000), vocab=VOCABULARY)
    what, body = generator.choice(list(bodies(generator, group).items()))
    fields: Fields = {"task": task.task_id, "attempt": str(attempt), "kind": task.kind, "producer": "a stranger"}
    if what == "no body":
        return "groups", what, {"x": "y"}
    return "groups", what, {**fields, "body": body}


def bodies(generator: random.Random, group: Group) -> dict[str, bytes]:
    """Wrong bodies of a group by what is wrong with them. Pure."""
    sound = encode_group(group, VOCABULARY)
    schema, fields = msgpack.unpackb(sound)
    flipped = bytearray(sound)
    flipped[generator.randrange(len(sound))] ^= 1 << generator.randrange(8)
    first = group.trajectories[0]
    nan = replace(first, logprobs_T=np.full_like(first.logprobs_T, np.nan))
    spans = tuple(VersionSpan(span.start, span.end, PolicyVersion(900, 1)) for span in first.spans)
    return {
        "no body": b"",
        "no msgpack": generator.randbytes(200),
        "half a group": sound[: len(sound) // 2],
        "a changed byte": bytes(flipped),
        "another schema": msgpack.packb([schema + 1, fields]),
        "NaN": encode_group(replace(group, trajectories=(nan, *group.trajectories[1:])), VOCABULARY),
        "a token beyond the vocabulary": msgpack.packb([schema, {**fields, "ids": b"\xff" * len(fields["ids"])}]),
        "a mask too short": msgpack.packb([schema, {**fields, "mask": fields["mask"][:-4]}]),
        "an unknown version": encode_group(
            replace(group, trajectories=(replace(first, spans=spans), *group.trajectories[1:])), VOCABULARY
        ),
        "a foreign group": sound,
        "a huge one": msgpack.packb([schema, {**fields, "ids": b"\0" * HUGE}]),
    }
