"""The books of a weight service: bounded, and true to what it was told."""

from __future__ import annotations

from broker.api import Peer
from headrace.version import PolicyVersion
from weightsync.books import MAX_PAGES, Books


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def producer(name: str, on: int, *, alive: bool = True) -> Peer:
    return Peer(name, "producer", "host", 1, alive, {"version": str(version(on))})


def test_the_oldest_pages_go_first() -> None:
    books = Books()
    for step in range(MAX_PAGES + 5):
        books.open(version(step), "host", 10, 0.0)
    kept = list(books.as_json())
    assert len(kept) == MAX_PAGES
    assert kept[0] == str(version(MAX_PAGES + 4))
    assert kept[-1] == str(version(5))
    books.open(version(0), "host", 10, 0.0)
    assert books.page(version(0)) is None
    assert len(books.as_json()) == MAX_PAGES


def test_readers_and_producers_are_those_of_the_last_look() -> None:
    books = Books()
    for step in (1, 2):
        books.open(version(step), "host", 10, 0.0)
    weights = Peer("weights", "weights", "host", 1, True, {"version": str(version(2))})
    peers = [producer("b", 2), producer("a", 2), producer("dead", 2, alive=False), producer("c", 1), weights]
    books.observe({version(1): ["z", "y"]}, peers)
    first, second = books.page(version(1)), books.page(version(2))
    assert first is not None
    assert second is not None
    assert (first.readers, first.on_it) == (("y", "z"), ("c",))
    assert (second.readers, second.on_it) == ((), ("a", "b"))
    books.observe({}, [])
    assert {(page["readers"], page["on_it"]) for page in books.as_json().values()} == {((), ())}


def test_a_page_remembers_its_check_until_it_is_freed() -> None:
    books = Books()
    books.open(version(1), "here", 10, 5.0)
    books.open(version(2), "elsewhere", 10, 6.0)
    books.checked(version(1), "verified", 0.5)
    books.open(version(1), "here", 99, 9.0)
    page = books.page(version(1))
    assert page is not None
    assert (page.check, page.check_s, page.nbytes, page.freed) == ("verified", 0.5, 10, False)
    assert books.unfreed("here") == [version(1)]
    books.freed(version(1))
    books.freed(version(9))
    assert books.unfreed("here") == []
