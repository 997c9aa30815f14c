"""The SGLang servers of tests/sglang/: where SGLang is, and how a small one is started on the CPU.

`.ci/sglang` puts it into a virtual environment of its own. HEADRACE_TEST_SGLANG_AT="URL KEY" names a server that is
there already (started with `python -m tests.sglang_servers`, say): while one writes a test, that saves its start.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from producers.engines.remote.options import parsed
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.engine import SglangEngine
from producers.engines.sglang.launch import LaunchSpec, Server
from producers.engines.sglang.options import Options
from tests.remote_engines import letters, server_python
from tests.support import wait_until
from tests.tiny import save_tiny_llama

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


def tiny_spec(model: Path, *args: str, logs: Path | None = None) -> LaunchSpec:
    """A server of one core for a tiny model in float32; `args` go behind the usual ones, and win."""
    return LaunchSpec(
        model, python=server_python("sglang"), args=(*_ARGS.split(), *args), env=ENV, logs=logs, start_s=240.0
    )


def engine_at(url: str, model: Path, **options: object) -> SglangEngine:
    """At a server that is there already, whose key is in the environment."""
    made = parsed(Options, {"urls": [url], "poll_s": 0.1, **options})
    return SglangEngine(model, made, slots=8, context_length=200, seed=3, decode=letters)


async def decodes(engine: SglangEngine) -> None:
    """Until a server says that it does; its own last reading may be older than the requests."""

    async def running() -> bool:
        return any([(await one.client.loads()).total().running for one in engine.replicas])

    await wait_until(running, "it decodes")


@dataclass(frozen=True, slots=True)
class There:
    """A server that is there already, as far as tests look at one."""

    url: str
    admin_key: str


async def _serve() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(tiny_spec(save_tiny_llama(Path(folder))), "sglang")
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
