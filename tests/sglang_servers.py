"""The SGLang servers of tests/sglang/: where SGLang is, and how a small one is started on the CPU.

`.ci/sglang` puts it into a virtual environment of its own. With HEADRACE_TEST_ALL_SERVERS=1 tests fail where it is
missing, elsewhere they are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from producers.engines.sglang.launch import LaunchSpec
from tests.tiny import save_tiny_llama

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".servers" / "sglang"
ENV = {
    # Without the kernels for the CPU, which no package has, it computes with those of torch.
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_ARGS = """
    --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule
    --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled --mem-fraction-static 0.1
    --max-total-tokens 16384 --max-running-requests 16 --sleep-on-idle --enable-metrics --dtype float32 --random-seed 1
"""


def sglang_python() -> str:
    """The interpreter that has SGLang. Skips the test where there is none; fails it where all servers must be there."""
    if not (VENV / ".ready").exists():
        reason = f"no SGLang in {VENV}: run .ci/sglang"
        if os.environ.get("HEADRACE_TEST_ALL_SERVERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(VENV / "bin" / "python")


def tiny_spec(model: Path, *args: str, logs: Path | None = None) -> LaunchSpec:
    """A server of one core for a tiny model in float32; `args` go behind the usual ones, and win."""
    return LaunchSpec(model, python=sglang_python(), args=(*_ARGS.split(), *args), env=ENV, logs=logs, start_s=240.0)


def save_model(folder: Path, seed: int = 0) -> Path:
    """A tiny random Llama with its tokenizer, in float32."""
    return save_tiny_llama(folder, seed)
