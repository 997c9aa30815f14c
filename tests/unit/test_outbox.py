"""Groups that wait together leave together, within bounds, and each waits for its own answer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest

from broker.redis.link import Link
from broker.redis.outbox import MOST_BYTES, MOST_GROUPS, Outbox
from headrace.errors import BrokerUnavailable, WireError
from tests.support import wait_until


class Scripts:
    """Stands for a Link: notes what is sent, and answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.may_answer = asyncio.Event()
        self.error: BrokerUnavailable | None = None

    async def script(self, name: str, producer: str, remembered: int, *groups: Any) -> list[bytes]:
        assert name == "publish"
        entries = list(groups[::5])
        self.sent.append((producer, entries))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [f"answer to {entry}".encode() for entry in entries]


def publish(outbox: Outbox, entry: str, *, producer: str = "p0", nbytes: int = 10) -> asyncio.Task[str]:
    return asyncio.create_task(outbox.publish(producer, (entry, "task", 1, "train"), lambda: b"x" * nbytes))


def an_outbox() -> tuple[Outbox, Scripts]:
    scripts = Scripts()
    return Outbox(cast(Link, scripts)), scripts


async def test_what_waits_while_a_script_is_under_way_goes_with_the_next() -> None:
    outbox, scripts = an_outbox()
    publishing = [publish(outbox, str(number)) for number in range(MOST_GROUPS + 3)]
    await wait_until(lambda: bool(scripts.sent), "the first script is sent")
    publishing += [publish(outbox, str(number)) for number in range(MOST_GROUPS + 3, MOST_GROUPS + 5)]
    scripts.may_answer.set()
    answers = await asyncio.gather(*publishing)
    assert answers == [f"answer to {number}" for number in range(MOST_GROUPS + 5)]
    assert [len(entries) for _, entries in scripts.sent] == [MOST_GROUPS, 5]
    assert [entry for _, entries in scripts.sent for entry in entries] == [str(n) for n in range(MOST_GROUPS + 5)]
    scripts.sent.clear()
    assert await publish(outbox, "later") == "answer to later"


async def test_a_script_has_no_more_bytes_than_one_group_or_the_bound() -> None:
    outbox, scripts = an_outbox()
    scripts.may_answer.set()
    sizes = [MOST_BYTES // 2, MOST_BYTES // 2, 1, MOST_BYTES + 1, MOST_BYTES, 1]
    await asyncio.gather(*(publish(outbox, str(number), nbytes=nbytes) for number, nbytes in enumerate(sizes)))
    assert [entries for _, entries in scripts.sent] == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]


async def test_a_group_that_cannot_be_encoded_is_its_callers_alone() -> None:
    outbox, scripts = an_outbox()
    scripts.may_answer.set()

    def fails() -> bytes:
        raise WireError("arrays differ in length")

    bad = asyncio.create_task(outbox.publish("p0", ("bad", "task", 1, "train"), fails))
    others = [publish(outbox, name) for name in ("a", "b")]
    with pytest.raises(WireError, match="differ in length"):
        await bad
    assert await asyncio.gather(*others) == ["answer to a", "answer to b"]
    assert [entries for _, entries in scripts.sent] == [["a", "b"]]


async def test_a_group_is_encoded_once_and_only_while_somebody_waits_for_it() -> None:
    outbox, scripts = an_outbox()
    encoded: list[str] = []

    def encode(name: str) -> bytes:
        encoded.append(name)
        return b"x" * MOST_BYTES

    names = ["first", "second", "gone", "third"]
    publishing = [
        asyncio.create_task(outbox.publish("p0", (name, "task", 1, "train"), partial(encode, name))) for name in names
    ]
    await wait_until(lambda: bool(scripts.sent), "the first script is sent")
    publishing.pop(2).cancel()
    scripts.may_answer.set()
    await asyncio.gather(*publishing)
    assert encoded == ["first", "second", "third"]
    assert [entries for _, entries in scripts.sent] == [["first"], ["second"], ["third"]]


async def test_a_script_is_of_one_producer() -> None:
    outbox, scripts = an_outbox()
    scripts.may_answer.set()
    names = ["a", "a", "b", "a"]
    await asyncio.gather(*(publish(outbox, str(number), producer=name) for number, name in enumerate(names)))
    assert scripts.sent == [("a", ["0", "1"]), ("b", ["2"]), ("a", ["3"])]


async def test_who_is_cancelled_leaves_the_others_alone() -> None:
    outbox, scripts = an_outbox()
    first = publish(outbox, "first")
    await wait_until(lambda: bool(scripts.sent), "the first script is sent")
    second, third = publish(outbox, "second"), publish(outbox, "third")
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    scripts.may_answer.set()
    assert await third == "answer to third"
    assert [entries for _, entries in scripts.sent] == [["first"], ["third"]]
    assert await publish(outbox, "fourth") == "answer to fourth"


async def test_an_error_is_everybodys_whose_group_went_with_it() -> None:
    outbox, scripts = an_outbox()
    scripts.error = BrokerUnavailable("Redis is away")
    publishing = [publish(outbox, str(number)) for number in range(2)]
    await wait_until(lambda: bool(scripts.sent), "the script is sent")
    later = publish(outbox, "later")
    scripts.may_answer.set()
    for one in (*publishing, later):
        with pytest.raises(BrokerUnavailable, match="Redis is away"):
            await one
    scripts.error = None
    assert await publish(outbox, "again") == "answer to again"


async def test_closing_lets_nobody_wait() -> None:
    outbox, scripts = an_outbox()
    sent = publish(outbox, "sent")
    await wait_until(lambda: bool(scripts.sent), "the script is sent")
    waiting = publish(outbox, "waiting")
    await asyncio.sleep(0)
    await outbox.close()
    for one in (sent, waiting):
        with pytest.raises(asyncio.CancelledError):
            await one
    await outbox.close()
