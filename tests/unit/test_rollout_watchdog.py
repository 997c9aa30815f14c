"""The watchdog: it ends what stands still, says who stands in the way, and leaves what turns alone."""

from __future__ import annotations

import asyncio
import threading

from producers.watchdog import LEASES, LOOKS, Watchdog
from tests.support import wait_until

LEASE_S = 0.04


class End:
    """Takes the sentence instead of the end of this process."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.sentence = ""

    def __call__(self, sentence: str) -> None:
        self.sentence = sentence
        self.come.set()


async def test_who_blocks_the_event_loop_is_named() -> None:
    end = End()
    watchdog = Watchdog("p1", LEASE_S, end)
    watchdog.start()

    async def stubborn() -> bool:
        return end.come.wait(20)

    assert await asyncio.create_task(stubborn(), name="environment 'own' with task t1")
    assert end.sentence.startswith("environment 'own' with task t1 (")
    assert ", in wait) has blocked everything for 0.24 s; code that waits" in end.sentence


async def test_a_loop_that_turns_now_and_then_goes_on() -> None:
    end, turns, lease_s = End(), 0, 5 * LEASE_S
    watchdog = Watchdog("p1", lease_s, end)
    watchdog.start()
    for _ in range(3):
        # Longer than a look, and much shorter than all of them.
        end.come.wait(2 * lease_s / LOOKS)
        turns += 1
        await asyncio.sleep(lease_s / LOOKS)
    watchdog.close()
    await wait_until(lambda: not watchdog._thread.is_alive(), "it has ended")
    assert (turns, end.come.is_set()) == (3, False)
    assert LEASES > 1


async def test_what_holds_up_the_end_is_ended() -> None:
    end = End()
    Watchdog("p1", LEASE_S, end).leave(0.01, "leaving")
    await wait_until(end.come.is_set, "the end has come")
    assert end.sentence == "leaving did not end within 0.01 s; it ends by force"


def test_it_goes_with_its_loop() -> None:
    made: list[Watchdog] = []

    async def briefly() -> None:
        made.append(Watchdog("p1", LEASE_S, End()))
        made[0].start()

    asyncio.run(briefly())
    made[0]._thread.join(20)
    assert not made[0]._thread.is_alive()
