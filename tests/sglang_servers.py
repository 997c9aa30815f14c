"""The SGLang servers of tests/sglang/: where SGLang is, and how a small one is started on the CPU.

`.ci/sglang` puts it into a virtual environment of its own. With HEADRACE_TEST_ALL_SERVERS=1 tests fail where it is
missing, elsewhere they are skipped. HEADRACE_TEST_SGLANG_AT="URL KEY" names a server that is there already (started
with `python -m tests.sglang_servers`, say): while one writes a test, that saves its start.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from broker.messages import Float32
from headrace.policy.loading import layout_of
from producers.engines.api import Engine
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.launch import LaunchSpec, Server
from tests.tiny import save_tiny_llama
from weightsync.manifest import Layout

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

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
    --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled --mem-fraction-static 0.7
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


def stage(engine: Engine, model: LlamaForCausalLM) -> None:
    """Put a model's weights, in float32, where the engine takes its next version from."""
    layout = Layout.of(layout_of(model, "float32"))
    out = engine.back_buffer(layout)
    for spec, (_, parameter) in zip(layout.tensors, model.named_parameters(), strict=True):
        flat = parameter.detach().float().contiguous().numpy().reshape(-1).view(np.uint8)
        out[spec.offset : spec.end] = flat


def scored(model: LlamaForCausalLM, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Float32:
    """Log-prob of each of N tokens behind a prompt, by one forward pass."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    logprobs_TV = torch.log_softmax(logits_TV, -1)
    places = range(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    return np.array([float(logprobs_TV[place, token]) for place, token in zip(places, tokens, strict=True)], np.float32)


@dataclass(frozen=True, slots=True)
class There:
    """A server that is there already, as far as tests look at one."""

    url: str
    admin_key: str


async def _serve() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(tiny_spec(save_model(Path(folder))), "sglang")
        async with SglangClient(server.url, server.admin_key) as client:
            try:
                await server.ready(client)
                print(f'export HEADRACE_TEST_SGLANG_AT="{server.url} {server.admin_key}"', flush=True)
                while not await server.ended_within(3600.0):
                    pass
            finally:
                await server.close()


if __name__ == "__main__":
    asyncio.run(_serve())
