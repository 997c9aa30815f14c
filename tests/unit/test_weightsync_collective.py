"""What two ends of a pair say to each other, whom they agree on, and that torch stays in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.api import RunRecord
from broker.connect import connect_run
from headrace.errors import WireError
from headrace.service import Service
from headrace.telemetry.metrics import Metrics
from headrace.version import PolicyVersion
from producers.engines.scripted import ScriptedEngine
from producers.gauges import Gauges
from tests.conftest import BROKER
from weightsync.arena import Arena
from weightsync.bulk.frames import (
    LENGTH,
    MAX_BACKENDS,
    MAX_TEXT,
    Offer,
    Pair,
    decode_offer,
    decode_refusal,
    decode_request,
    encode_offer,
    encode_refusal,
    encode_request,
)
from weightsync.bulk.pairs import BACKENDS, Hosting, PairBroken, agreed
from weightsync.mirror import Outcome
from weightsync.service import WeightService
from weightsync.transports import KINDS
from weightsync.transports.pair import interface_of

backends = st.lists(st.sampled_from(BACKENDS), unique=True).map(tuple)


@given(st.lists(st.text(max_size=20), max_size=MAX_BACKENDS).map(tuple))
def test_a_question_for_a_pair_is_read_as_it_was_written(wanted: tuple[str, ...]) -> None:
    assert decode_request(encode_request(Pair(wanted))[LENGTH.size :]) == Pair(wanted)


@given(st.builds(Offer, st.integers(1, 65535), st.text(max_size=40), st.text(max_size=40)))
def test_an_offer_is_read_as_it_was_written(offer: Offer) -> None:
    assert decode_offer(encode_offer(offer)) == offer


def test_a_refusal_is_read_as_far_as_it_goes() -> None:
    assert decode_refusal(encode_refusal("full")) == "full"
    assert decode_refusal(encode_refusal("x" * 9999)) == "x" * MAX_TEXT


@pytest.mark.parametrize(
    "row", [["pair"], ["pair", "gloo"], ["pair", [1]], ["pair", ["x" * (MAX_TEXT + 1)]], ["pair", ["gloo"] * 9]]
)
def test_a_question_for_a_pair_that_is_none_is_refused(row: object) -> None:
    with pytest.raises(WireError):
        decode_request(msgpack.packb(row))


@pytest.mark.parametrize("row", [7, [0, "t", "gloo"], [65536, "t", "gloo"], [1, "t"], [1, b"t", "gloo"]])
def test_an_offer_that_is_none_is_refused(row: object) -> None:
    with pytest.raises(WireError):
        decode_offer(msgpack.packb(row))


@pytest.mark.parametrize("row", ["why", [], ["a", "b"], [1]])
def test_a_refusal_that_is_none_is_refused(row: object) -> None:
    with pytest.raises(WireError):
        decode_refusal(msgpack.packb(row))


@given(backends, backends)
def test_both_ends_agree_on_the_best_that_both_have(mine: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    best = agreed(mine, theirs)
    both = set(mine) & set(theirs)
    assert best == min(both, key=BACKENDS.index, default=None)
    assert best == agreed(theirs, mine)


def test_a_server_says_why_it_makes_no_pair() -> None:
    with pytest.raises(PairBroken, match="not collective there"):
        Hosting((), 1.0).begin(("gloo",))
    with pytest.raises(PairBroken, match="offers ucc, gloo, this end nccl"):
        Hosting(("ucc", "gloo"), 1.0).begin(("nccl",))
    closed = Hosting(("gloo",), 1.0)
    closed.close()
    with pytest.raises(PairBroken, match="0 pairs"):
        closed.begin(("gloo",))


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
    assert interface_of("::1") == ""


async def test_metrics_name_the_transport_and_its_backend(record: RunRecord, tmp_path: Path) -> None:
    port = connect_run(f"memory:{record.run_id}", record.run_id, BROKER)
    of_service, of_producer = Metrics("r", "w1"), Metrics("r", "p1")
    service = WeightService(
        port, Service("w1"), name="w1", run_id="r", host="h", lease_s=1.0, block_ms=10, metrics=of_service,
        arena=Arena(tmp_path),
    )  # fmt: skip
    service._imported(Outcome("held", PolicyVersion(1, 1), transport="collective-gloo"))
    Gauges(ScriptedEngine(), of_producer, None).transport("collective-gloo")
    for metrics in (of_service, of_producer):
        lines = [
            line for line in metrics.render().decode().splitlines() if line.startswith("headrace_weight_transport{")
        ]
        (now,) = [line for line in lines if line.endswith(" 1.0")]
        assert 'kind="collective-gloo"' in now
        assert len(lines) == len(KINDS)
    await port.close()


def test_services_that_go_by_collective_import_no_torch() -> None:
    code = "import weightsync.__main__, weightsync.choosing, weightsync.transports.pair, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "weightsync.transports.collective" in modules
    assert not modules & {"torch", "transformers"}
