"""The check for a GPU runs from end to end, on the CPU; on a machine without a GPU it says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.timeout(310)
def test_all_of_it_runs_on_the_cpu(tmp_path: Path) -> None:
    done = check("--device", "cpu", "--small", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert {"matmul_fraction", "decode_vs_memory", "load_vs_copy", "broadcast", "tokens_vs_dense"} <= figures.keys()
    for name in ("packed_mismatch", "engine_mismatch", "padding_waste"):
        assert figures[name]["holds"], (name, figures[name])
    assert figures["padding_waste"]["value"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_runs_instead() -> None:
    done = check()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--device cpu --small runs the same on the CPU, to see that it does")
