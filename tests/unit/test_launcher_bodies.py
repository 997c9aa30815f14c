"""Bodies of unknown origin as a person reads them."""

from __future__ import annotations

import msgpack
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import encode_group, encode_task
from deploy.bodies import ROW, SHOWN_BYTES, describe, hex_lines
from deploy.printable import printable
from tests.support import make_group, make_task

TASK = make_task("t")
BODY = encode_task(TASK)
GROUP = encode_group(make_group(TASK, 1, "p"), 100)


def test_a_tasks_fields_are_shown() -> None:
    lines = describe("tasks", BODY)
    assert lines[0] == "schema 2"
    assert "env          arithmetic" in lines
    assert "min          [1, 0]" in lines


def test_a_groups_numbers_are_summed_up() -> None:
    lines = describe("groups", GROUP)
    assert "2 trajectories of 10, 10 tokens" in lines
    assert any(line.startswith("20 token ids from ") for line in lines)
    assert lines[-1] == "sampled by versions 1.4, 1.5"


def test_another_schema_is_shown_too() -> None:
    lines = describe("groups", bytes(msgpack.packb([9, {"task": "t"}])))
    assert lines == ["schema 9", "task         t", "group: schema 9, but this process speaks 2"]


def test_numbers_that_are_none_do_not_hide_the_others() -> None:
    group = make_group(TASK, 1, "p")
    group.trajectories[1].logprobs_T[-1] = np.inf
    lines = describe("groups", encode_group(group, 100))
    assert "log-prob number 11 (token 9 of trajectory 1) is inf" in lines
    assert any(line.startswith("12 log-probs from -") for line in lines)


def test_a_probability_above_one_is_found() -> None:
    group = make_group(TASK, 1, "p")
    group.trajectories[0].logprobs_T[-1] = 0.5
    assert "log-prob number 5 (token 9 of trajectory 0) is 0.5" in describe("groups", encode_group(group, 100))


@given(st.integers(0, len(GROUP)))
def test_a_cut_body_is_read_as_far_as_it_goes(length: int) -> None:
    whole, cut = describe("groups", GROUP), describe("groups", GROUP[:length])
    assert length == len(GROUP) or cut == [] or cut[:-1] == whole[: len(cut) - 1]


@given(st.binary(max_size=600))
def test_any_bytes_can_be_shown(body: bytes) -> None:
    for line in (*describe("groups", body), *describe("tasks", body), *hex_lines(body)):
        assert line.isprintable()
    shown = hex_lines(body)
    assert len(shown) == -(-min(len(body), SHOWN_BYTES) // ROW) + (len(body) > SHOWN_BYTES)
    assert "".join(row[10:57].replace(" ", "") for row in shown[: -1 if len(body) > SHOWN_BYTES else None]) == (
        body[:SHOWN_BYTES].hex()
    )


@given(st.text())
def test_nothing_that_a_terminal_would_obey_is_printed(text: str) -> None:
    assert printable(text).isprintable()


def test_a_body_of_very_many_fields_shows_some() -> None:
    lines = describe("tasks", msgpack.packb([2, {f"name {number}": number for number in range(5000)}]))
    assert len(lines) < 200
    assert lines[-1] == "… 4,900 more fields"
