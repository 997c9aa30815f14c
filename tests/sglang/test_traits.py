"""What a real server says of how it runs."""

from __future__ import annotations

from pathlib import Path

from producers.engines.sglang.launch import Server
from producers.engines.traits import Trait
from tests.sglang_servers import engine_at


async def test_a_server_tells_what_it_runs_on(sglang_server: Server, sglang_model: Path) -> None:
    engine = engine_at(sglang_server.url, sglang_model)
    await engine.start()
    try:
        found = await engine.traits()
    finally:
        await engine.close()
    assert found.device == "cpu"
    assert found.software.startswith("SGLang 0.")
    assert (found.native_backend.has, found.attention_kernel.has) == (False, False)
    assert "torch_native" in found.attention_kernel.what
    assert found.paged_cache == Trait(True, "pages of 1 token, prefixes shared")
