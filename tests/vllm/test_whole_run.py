"""A whole run on a real vLLM server: `headrace up` trains on what it samples, and has it follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote_engines import launching, run_config, trained
from tests.vllm_servers import VllmServer

STEPS = 10


@pytest.mark.timeout(900)
def test_ten_steps_with_updates_in_flight(vllm_server: VllmServer, vllm_model: Path, tmp_path: Path) -> None:
    with launching(tmp_path) as launched:
        trained(launched, run_config(vllm_model, "openai", STEPS, 2, f'urls = ["{vllm_server.url}"]'), STEPS)
