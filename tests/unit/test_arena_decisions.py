"""Which segments are freed, and which staged version gives way: pure decisions and what always holds of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.api import Versions
from headrace.version import PolicyVersion
from weightsync.retention import Held, freeable
from weightsync.staging import LAST_BACKOFF_S, NEARLY_DONE, backoff_s, given_up, gives_way, next_version

versions = st.builds(PolicyVersion, st.integers(0, 3), st.integers(0, 6))
held_lists = st.lists(st.tuples(versions, st.booleans()), max_size=10, unique_by=lambda item: item[0]).map(
    lambda items: [Held(f"segment-{version}", version, alive) for version, alive in items]
)


@given(held_lists, st.none() | versions, st.sets(versions, max_size=4))
def test_nothing_needed_is_freed_and_nothing_useless_is_kept(
    held: list[Held], head: PolicyVersion | None, leased: set[PolicyVersion]
) -> None:
    freed = {item.name for item in freeable(held, head, leased)}
    for item in held:
        if head is None or item.version > head:
            needed = item.owner_alive
        else:
            needed = item.version == head or item.version in leased
        assert (item.name not in freed) == needed


@given(held_lists, versions, st.sets(versions, max_size=4))
def test_of_dead_owners_stay_the_head_and_what_is_read_of_older_versions(
    held: list[Held], head: PolicyVersion, leased: set[PolicyVersion]
) -> None:
    dead = [Held(item.name, item.version, False) for item in held]
    going = freeable(dead, head, leased)
    staying = {item.version for item in dead if item not in going}
    assert staying <= {version for version in leased if version < head} | {head}


@given(versions, st.none() | versions, st.floats(0, 1), st.integers(0, 3))
def test_staging_gives_way_only_to_a_newer_version_early_and_once_in_a_row(
    staging: PolicyVersion, newest: PolicyVersion | None, staged: float, skips: int
) -> None:
    expected = newest is not None and newest > staging and staged < NEARLY_DONE and skips == 0
    assert gives_way(staging, newest, staged, skips) == expected


@given(versions, st.none() | versions, st.none() | versions)
def test_version_is_given_up_once_a_newer_one_was_begun_before_it_was_sealed(
    begun: PolicyVersion, head: PolicyVersion | None, coming: PolicyVersion | None
) -> None:
    sealed = head is not None and head >= begun
    assert given_up(begun, Versions(head, coming)) == (not sealed and coming is not None and coming > begun)


@given(st.integers(-3, 2000))
def test_backoff_grows_and_is_bounded(failures: int) -> None:
    assert 0 <= backoff_s(failures) <= backoff_s(failures + 1) <= LAST_BACKOFF_S
    assert failures <= 0 or backoff_s(failures) > 0


@given(st.none() | versions, st.none() | versions, st.none() | versions, st.none() | versions)
def test_what_failed_is_not_tried_again_at_once_nor_anything_older(
    head: PolicyVersion | None,
    coming: PolicyVersion | None,
    current: PolicyVersion | None,
    failed: PolicyVersion | None,
) -> None:
    chosen = next_version(Versions(head, coming), current, failed)
    wanted = [
        version
        for version in (head, coming)
        if version is not None and all(known is None or version > known for known in (current, failed))
    ]
    assert chosen == next(iter(wanted), None)
