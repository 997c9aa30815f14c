"""A producer that shares no code with headrace: docs/wire-protocol.md in Python, with redis-py and msgpack alone.

    headrace scripts scripts/
    HEADRACE_REDIS_URL=redis://… HEADRACE_RUN=… python examples/foreign_producer.py scripts/

It plays every task with a "policy" that draws tokens uniformly: put your own engine where `play` is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import redis

SCHEMA = 2
REMEMBERED, KEPT_BYTES, KEPT_DEAD, PEERS, SILENT_MS = 4096, 1 << 20, 256, 1024, 600_000
"""What the scripts `publish`, `bury_task` and `heartbeat` are told to keep."""
BLOCK_MS = 500

Task = dict[str, Any]
Rollout = dict[str, Any]
"""One trajectory: prompt, completion (token ids), logprobs (of the completion), reward, finish, correct."""
Play = Callable[[Task], list[Rollout]]
"""A task's fields to its rollouts; raises ValueError with the reason when there are none."""


class Left(Exception):
    """The run does not want this producer (any more)."""


class Producer:
    """One connection, one thread."""

    def __init__(self, url: str, run: str, name: str, scripts: Path, play: Play | None = None) -> None:
        self.redis = redis.Redis.from_url(url, protocol=2, socket_timeout=BLOCK_MS / 1000 + 5, socket_keepalive=True)
        self.run_id, self.name, self.play = run, name, play
        self.beat_key = self.key(f"beat:{name}")
        index = json.loads((scripts / "scripts.json").read_text())
        if index["schema"] != SCHEMA:
            raise Left(f"the scripts are of wire schema {index['schema']}")
        self.index = index["scripts"]
        self.texts = {script: (scripts / entry["file"]).read_bytes() for script, entry in self.index.items()}
        self.record: dict[str, Any] = {}
        self.held: dict[bytes, Task] = {}
        self.lost_reply = False
        self.orders_after, self.heads_after = b"0-0", b"0-0"
        self.version: list[int] = []
        """[incarnation, step] of the weights that it samples from; empty before the first."""
        self.published = 0

    def key(self, noun: str) -> str:
        return f"{{hr:{self.run_id}}}:{noun}"

    # -- joining and leaving

    def join(self, digests: dict[str, str] | None = None) -> None:
        """Refuse ourselves what the run does not want: nobody else checks it. None takes the run's digests as ours."""
        raw = self.ask("GET", self.key("record"))
        if raw is None:
            raise Left("there is no such run")
        self.record = json.loads(raw)
        if self.record["schema"] != SCHEMA:
            raise Left(f"the run speaks wire schema {self.record['schema']}")
        if digests is not None and digests != self.record["digests"]:
            raise Left("the run has another model, tokenizer or chat template")
        if self.ask("HGET", self.key("state"), "status") in (b"finished", b"failed"):
            raise Left("the run has ended")
        self.play = self.play or uniform(self.record["vocab_size"])
        self.lease_ms = int(1000 * self.record["config"]["producer"]["lease_s"])
        self.most_deliveries = self.record["config"]["broker"]["max_deliveries"]
        newest = self.ask("XREVRANGE", self.key("orders"), "+", "-", "COUNT", 1)
        self.orders_after = newest[0][0] if newest else b"0-0"
        self.call("join", self.name, self.beat_key, self.lease_ms)

    def run(self) -> None:
        """Play until told to leave."""
        beaten = -math.inf
        while not self.told_to_leave():
            if time.monotonic() - beaten > self.lease_ms / 4000:
                self.beat()
                beaten = time.monotonic()
            ready = [entry for entry, task in self.held.items() if self.version >= task["min"]]
            for entry in ready:
                self.finish(entry)
            if self.held or not self.version:
                self.await_weights()
            else:
                self.take(1)

    def leave(self) -> None:
        if self.held:
            self.call("give_back", self.name, *self.held)
            self.held.clear()
        self.call("retire", self.name, self.beat_key)

    def told_to_leave(self) -> bool:
        kinds, mine = (b"drain", b"stop", b"end"), (b"", self.name.encode())
        told = False
        for entry, fields in entries(self.ask("XREAD", "STREAMS", self.key("orders"), self.orders_after)):
            self.orders_after = entry
            told = told or (fields.get(b"kind") in kinds and fields.get(b"target") in mine)
        return told

    # -- what keeps a producer alive, and up to date

    def beat(self) -> None:
        """Every quarter of the lease, whatever else goes on: keep the name, and what is held."""
        version = ".".join(str(part) for part in self.version)
        said = {"version": version, "published": self.published, "held": len(self.held)}
        peer = {"role": "producer", "host": socket.gethostname(), "pid": os.getpid(), "state": said}
        self.call("heartbeat", self.name, self.beat_key, self.lease_ms, json.dumps(peer), 1, PEERS, SILENT_MS)
        lost, unknown = self.call("renew", self.name, self.beat_key, self.lease_ms, len(self.held), *self.held)
        for entry in lost:
            self.held.pop(entry, None)
        self.lost_reply = self.lost_reply or bool(unknown)
        self.look_at_head()

    def look_at_head(self) -> None:
        """A real producer fetches these weights, checks them and swaps; then it samples from that version."""
        head = self.ask("HGET", self.key("state"), "head")
        if head:
            self.version = [int(part) for part in head.split(b".")]

    def await_weights(self) -> None:
        """Until there is another version, at most a block time."""
        heads = ("XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", self.key("heads"), self.heads_after)
        for entry, _ in entries(self.ask(*heads)):
            self.heads_after = entry
            self.look_at_head()

    # -- tasks in, groups out

    def take(self, count: int, block_ms: int = BLOCK_MS) -> list[bytes]:
        """At most `count` new tasks into `held`; returns their entry ids."""
        lost, self.lost_reply = self.lost_reply, True
        known = list(self.held) if lost else []
        _, rows = self.call("take", self.name, self.key("beat:"), self.lease_ms, count, int(lost), *known)
        found = [(entry, deliveries, fields_of(flat)) for entry, deliveries, flat in rows]
        if not found and block_ms:
            reader = ("XREADGROUP", "GROUP", "producers", self.name, "COUNT", count, "BLOCK", block_ms)
            found = [
                (entry, 1, fields) for entry, fields in entries(self.ask(*reader, "STREAMS", self.key("tasks"), ">"))
            ]
        self.lost_reply = False
        return [entry for entry, deliveries, fields in found if self.accept(entry, deliveries, fields)]

    def accept(self, entry: bytes, deliveries: int, fields: dict[bytes, bytes]) -> bool:
        """Whether this task is to be played; one that is not is ended here, by the protocol's rules."""
        body = fields.get(b"body", b"")
        task, reason = self.read(body, fields)
        if not reason and deliveries > self.most_deliveries:
            reason = f"delivered {self.most_deliveries} times, finished by nobody"
        if reason:
            digest = hashlib.sha256(body).hexdigest()
            self.call("bury_task", self.name, entry, reason, digest, len(body), KEPT_BYTES, KEPT_DEAD)
            return False
        attempt = int(fields[b"attempt"]) + deliveries
        if entry in self.held and self.held[entry]["attempt"] == attempt:
            return False
        self.held[entry] = {**task, "attempt": attempt}
        seconds, micros = self.ask("TIME")
        if seconds * 1000 + micros // 1000 > task["deadline"]:
            self.publish(entry, error="the deadline passed before a producer had a free slot")
            return False
        return True

    def read(self, body: bytes, fields: dict[bytes, bytes]) -> tuple[Task, str]:
        """A task's fields, or why this is no task."""
        try:
            schema, task = msgpack.unpackb(body)
            if schema != SCHEMA:
                return {}, f"task: schema {schema}, but this process speaks {SCHEMA}"
            if (task["task"].encode(), task["kind"].encode()) != (fields[b"task"], fields[b"kind"]):
                return {}, "the entry's fields and its body name different tasks"
            int(fields[b"attempt"])
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            return {}, f"task: the body is not a task ({type(error).__name__})"
        return task, ""

    def finish(self, entry: bytes) -> str:
        """Play a task that is held, and publish what came of it."""
        assert self.play is not None, "join comes first"
        try:
            rollouts = self.play(self.held[entry])
        except ValueError as error:
            return self.publish(entry, error=str(error) or "the rollout failed")
        return self.publish(entry, rollouts)

    def publish(self, entry: bytes, rollouts: list[Rollout] | None = None, error: str = "") -> str:
        """The answer: published, repeated or superseded. All three end this producer's part."""
        task = self.held[entry]
        body = group_body(task, self.name, rollouts or [], self.version, self.record["vocab_size"], error)
        names = (task["task"], task["attempt"], task["kind"])
        (raw,) = self.call("publish", self.name, REMEMBERED, entry, *names, body)
        answer: str = raw.decode()
        del self.held[entry]
        self.published += answer == "published"
        return answer

    # -- Redis

    def call(self, script: str, *args: Any) -> Any:
        """Run a script by its digest; its keys stand in the index."""
        entry = self.index[script]
        return self.ask("EVALSHA", entry["sha1"], len(entry["keys"]), *map(self.key, entry["keys"]), *args)

    def ask(self, *command: Any) -> Any:
        """One command, sent again where that may help: everything here may be sent twice."""
        give_up = time.monotonic() + 30
        while True:
            try:
                return self.redis.execute_command(*command)
            except redis.exceptions.NoScriptError:
                for text in self.texts.values():
                    self.redis.execute_command("SCRIPT LOAD", text)
            except redis.ResponseError as error:
                self.mend(error, give_up)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                self.wait(error, give_up)

    def mend(self, error: redis.ResponseError, give_up: float) -> None:
        """Do what helps against this error, or raise it."""
        if "GONE" in str(error):
            if not self.record or self.ask("EXISTS", self.key("deleted")):
                raise Left("the run is gone") from error
            # Redis was emptied; the run's trainer puts it back.
            self.wait(error, give_up)
            return
        if "NOGROUP" in str(error) or "UNBLOCKED" in str(error):
            self.call("repair")
        elif isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in str(error) or "MISCONF" in str(error):
            self.wait(error, give_up)
        else:
            raise error

    def wait(self, error: redis.RedisError, give_up: float) -> None:
        """With jitter, so that not all producers come back at once."""
        if time.monotonic() > give_up:
            raise Left(f"Redis is away: {error}") from error
        time.sleep(random.uniform(0.1, 0.5))


def entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Ids and fields in the reply of XREAD or XREADGROUP on one stream."""
    return [(entry, fields_of(flat)) for entry, flat in reply[0][1]] if reply else []


def fields_of(flat: Any) -> dict[bytes, bytes]:
    return dict(flat) if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))


def group_body(
    task: Task, producer: str, rollouts: list[Rollout], version: list[int], vocab_size: int, error: str
) -> bytes:
    """The body of a group whose members each have a prompt and one completion, sampled by one version."""
    ids, logprobs, mask, spans = [], [], [], []
    for rollout in rollouts:
        prompt, completion = rollout["prompt"], rollout["completion"]
        ids += prompt + completion
        logprobs += rollout["logprobs"]
        mask += [len(prompt), len(completion)]
        spans += [len(prompt), len(prompt) + len(completion), *version, 1]
    dtype, code = ("<u1", "B") if vocab_size <= 1 << 8 else ("<u2", "H") if vocab_size <= 1 << 16 else ("<u4", "I")
    fields = {
        "task": task["task"],
        "attempt": task["attempt"],
        "kind": task["kind"],
        "env": task["env"],
        "index": task["index"],
        "producer": producer,
        "failures": [],
        "outcome": "failed" if error else "played",
        "error": error,
        "stopped": [],
        "seconds": {},
        "dtype": dtype,
        "ids": packed(code, ids),
        "logprobs": packed("f", logprobs),
        "lengths": packed("I", [len(each["prompt"]) + len(each["completion"]) for each in rollouts]),
        "mask": packed("I", mask),
        "span_counts": packed("I", [1] * len(rollouts)),
        "spans": packed("I", spans),
        "rewards": packed("d", [each["reward"] for each in rollouts]),
        "finish": packed("B", [["stop", "length", "abort"].index(each["finish"]) for each in rollouts]),
        "correct": packed("B", [[False, True, None].index(each.get("correct")) for each in rollouts]),
    }
    return bytes(msgpack.packb([SCHEMA, fields]))


def packed(code: str, numbers: list[Any]) -> bytes:
    """Little-endian, one after the other."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def uniform(vocab_size: int) -> Play:
    """The policy that knows nothing: every token has the same probability, and the log-probs say so."""

    def play(task: Task) -> list[Rollout]:
        draw = random.Random(task["seed"])
        prompt = [draw.randrange(vocab_size) for _ in range(4)]
        rollouts = []
        for _ in range(task["size"]):
            completion = [draw.randrange(vocab_size) for _ in range(8)]
            rollout = {"prompt": prompt, "completion": completion, "finish": "length", "correct": None}
            rollout["logprobs"] = [-math.log(vocab_size)] * len(completion)
            rollouts.append({**rollout, "reward": float(completion[0] % 2)})
        return rollouts

    return play


def main(url: str, run: str, scripts: Path) -> None:
    producer = Producer(url, run, f"foreign-{os.getpid()}", scripts)
    producer.join()
    producer.run()
    producer.leave()


if __name__ == "__main__":
    try:
        main(os.environ["HEADRACE_REDIS_URL"], os.environ["HEADRACE_RUN"], Path(sys.argv[1]))
    except Left as reason:
        sys.exit(f"foreign producer: {reason}")
