"""The vLLM servers of tests/vllm/: where vLLM is, and how a small one is started on the CPU.

`.ci/vllm` puts it into a virtual environment of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from producers.engines.sglang import guard
from tests.remote_engines import server_python
from tests.support import wait_until
from tests.tiny import save_tiny_llama, tiny_llama

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

START_S = 400.0
CONTEXT = 4096
"""A tiny model samples it in seconds: requests that are to be under way still must be long."""
_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_ARGS = f"""
    --dtype float32 --enforce-eager --max-model-len {CONTEXT} --max-num-seqs 16 --max-num-batched-tokens 8192
    --distributed-executor-backend uni --served-model-name tiny --uvicorn-log-level warning
"""
"""So many batched tokens that no prompt is computed in parts, which ends a server on a CPU where it has a seed."""
_HEAD_DIM = 64
"""Its attention for the CPU knows only heads of at least 32."""


def small_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """In memory, float32; its output head is its own, unless told otherwise."""
    return tiny_llama(
        seed, **{"head_dim": _HEAD_DIM, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False, **changes}
    )


def save_small_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """The same as a Hugging Face folder with its tokenizer."""
    save_tiny_llama(folder, seed)
    small_llama(seed, **changes).save_pretrained(folder)
    return folder


class VllmServer:
    """One process group, which ends with this process."""

    def __init__(self, model: Path, log: Path, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [server_python("vllm"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(port), *_ARGS.split(), *args]
        self._guard = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-I", guard.__file__, *self._command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, **_ENV},
                start_new_session=True,
            )

    def restart(self) -> None:
        """At the same place, after `kill`."""
        self._guard = self._start()

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as session:

            async def answers() -> bool:
                assert self._guard.poll() is None, f"it ended: {self._log.read_text()[-3000:]}"
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(self.url + "/health", timeout=aiohttp.ClientTimeout(5.0)) as response:
                        return response.status == 200
                return False

            await wait_until(answers, "the server answers", START_S)

    def kill(self) -> None:
        """End it and all that it started, at once. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
