"""Batches: whole groups in order, judged at the moment they are formed."""

from __future__ import annotations

from broker.api import Reign
from consumers.batch import MOST_NOTES, Batcher
from consumers.books import Books
from consumers.ingest import entry
from consumers.lag import History, Staleness
from consumers.retention import Retained
from headrace.version import PolicyVersion
from tests.groups import delivery

ALONE = History({1: Reign(0, 0)})


def test_a_batch_is_whole_groups_in_order_of_arrival() -> None:
    batcher = Batcher(2, Staleness(4))
    for number in range(3):
        batcher.add(delivery(number, 5))
        assert batcher.missing() == max(0, 1 - number)
    assert batcher.nbytes == 30
    batch = batcher.form(7, ALONE, 3)
    assert batch is not None
    assert [d.group.task_id for d in batch.deliveries] == ["t0", "t1"]
    assert (batch.version, batch.lags, batch.nbytes, batch.masked) == (PolicyVersion(3, 8), (2, 2), 20, 0)
    assert batcher.form(8, ALONE, 3) is None
    assert (len(batcher), batcher.nbytes) == (1, 10)


def test_groups_over_the_bound_become_stale_and_stand_in_the_next_record() -> None:
    batcher = Batcher(1, Staleness(2))
    batcher.add(delivery(0, 4, 9))
    batcher.add(delivery(1, 7))
    stale = batcher.drop_stale(9, ALONE)
    assert [(d.entry_id, reason) for d, reason in stale] == [("0-0", "lag 5")]
    batcher.note(entry(stale[0][0], "stale", "lag 5"))
    batch = batcher.form(9, ALONE, 1)
    assert batch is not None
    assert [(e.task_id, e.verdict) for e in batch.record.entries] == [("t1", "trained"), ("t0", "stale")]
    assert batcher.drop_stale(9, ALONE) == []
    assert (len(batcher), batcher.nbytes) == (0, 0)


def test_masked_tokens_are_counted_and_the_lag_is_that_of_the_rest() -> None:
    batcher = Batcher(2, Staleness(2, mask=True))
    batcher.add(delivery(0, 4, 9))
    batcher.add(delivery(1, 7))
    assert batcher.drop_stale(9, ALONE) == []
    batch = batcher.form(9, ALONE, 1)
    assert batch is not None
    assert (batch.masked, batch.lags) == (1, (0, 2))


def test_verdicts_that_wait_for_a_step_are_bounded() -> None:
    batcher = Batcher(1, Staleness(2))
    for number in range(MOST_NOTES + 5):
        batcher.note(entry(delivery(number, 1), "failed"))
    batcher.add(delivery(9, 1))
    batch = batcher.form(1, ALONE, 1)
    assert batch is not None
    assert len(batch.verdicts) == MOST_NOTES
    assert batch.verdicts[-1].task_id == f"t{MOST_NOTES + 4}", "the newest are kept"


def test_books_keep_of_a_step_only_what_its_checkpoint_settles() -> None:
    batcher = Batcher(2, Staleness(2))
    books = Books(1, 0, 0, batcher)
    for number in range(5):
        batcher.add(delivery(number, 0, nbytes=10 + number))
    for step in range(2):
        batch = batcher.form(step, ALONE, 1)
        assert batch is not None
        books.took(batch)
    assert (books.formed, books.unsettled_groups, books.retained) == (2, 4, Retained(2, 46, 1, 14, 0))
    books.settled(1)
    assert [entry.task_id for step in books.unsettled for entry in step.entries] == ["t2", "t3"]
    assert (books.unsettled_groups, books.retained.unsettled_bytes) == (2, 25)
