"""`headrace portability` as a user meets it: the embedded engine with a small model, measured twice and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from audit.portability_record import Record, read_record


def portability(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "portability", *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of the tiny model at two batch sizes."""
    out = tmp_path_factory.mktemp("portability") / "torch.json"
    sizes = ["--batch", "4", "--batch", "2", "--length", "8", "--prompt", "16", "--seconds", "0.6"]
    done = portability("measure", str(out), "--model", str(tiny_model), *sizes, "--set", "model.dtype=float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\nwrote {out}\n")
    assert [line.partition(":")[0] for line in done.stderr.splitlines() if "tokens/s" in line] == [
        "8 tokens, one request",
        "8 tokens, batch 2",
        "8 tokens, batch 4",
    ]
    return out


@pytest.fixture
def record(made: Path) -> Record:
    return read_record(made)


def test_the_embedded_engine_is_measured(record: Record) -> None:
    assert (record.engine, record.prompt_tokens) == ("torch", 16)
    assert [(rate.completion_tokens, rate.batch) for rate in record.sustained] == [(8, 2), (8, 4)]
    for rate in (*record.single, *record.sustained):
        assert rate.mean_tokens == 8
        assert rate.completions > 0
        assert 0 < rate.in_flight < rate.batch * 1.01
        # What ended in time, and at most what was under way at both ends.
        counted = rate.tokens_per_s * rate.seconds / 8
        assert abs(counted - rate.completions) <= rate.batch


def test_the_embedded_engine_tells_what_it_runs_on(record: Record) -> None:
    traits = record.traits
    assert traits.device.endswith("(cpu)")
    assert traits.software.startswith("torch ")
    assert traits.software.endswith(", float32")
    assert (traits.native_backend.has, traits.native_backend.what) == (True, "torch's for the CPU")
    assert (traits.attention_kernel.has, traits.paged_cache.has) == (False, True)
    assert record.label == f"torch on {traits.device}"


def test_two_records_are_compared(made: Path) -> None:
    shown = portability("compare", str(made), str(made), "--baseline-price", "1")
    assert shown.returncode == 0, shown.stderr
    assert "the candidate makes 1.00 times as many tokens/s" in " ".join(shown.stdout.split())
    assert "note: the candidate was measured for 0.6 s only" in shown.stdout
    told = json.loads(portability("compare", str(made), str(made), "--candidate-price", "2", "--json").stdout)
    assert len(told["rows"]) == 5
    assert told["real"]["batch"] == 4
    rate = read_record(made).sustained[1].tokens_per_s
    assert told["real"]["price"] == {"baseline": None, "candidate": pytest.approx(2 / rate / 3600 * 1e6)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compare", "{made}", "/none.json"), "headrace: /none.json cannot be read: No such file or directory"),
        (("compare", "{made}", "{made}", "--candidate-price", "nan"), "headrace: --candidate-price nan is no price"),
        (("measure", "{made}", "--seconds", "0"), "headrace: --seconds 0 must be more than 0 and at most 86400"),
        (("measure", "{folder}/none/a.json"), "headrace: {folder}/none/a.json cannot be written: there is no folder"),
        (("measure", "{made}", "--engine", "bogus"), "headrace: producer.engine = 'bogus' is not one of"),
        (("measure", "{made}", "--length", "4096", "--model", "{model}"), "more than the 512 positions of"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    made: Path, tiny_model: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    places = {"made": made, "folder": made.parent, "model": tiny_model}
    before = made.read_bytes()
    done = portability(*(argument.format(**places) for argument in arguments))
    assert done.returncode == 2
    assert sentence.format(**places) in done.stderr
    assert done.stderr.count("\n") == 1
    assert made.read_bytes() == before
