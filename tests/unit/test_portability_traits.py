"""What engines tell of how they run: read from what servers answer, and unknown where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from producers.engines.openai import traits as openai
from producers.engines.openai.client import CompletionsClient
from producers.engines.sglang import traits as sglang
from producers.engines.torch_traits import device_name
from producers.engines.traits import UNTOLD, Trait, Traits, agreed, traits_of
from tests.completion_server import CompletionServer

SGLANG = {"version": "0.5.23", "device": "cpu", "attention_backend": "torch_native", "page_size": 1}
METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="573"} 1.0
"""


def test_sglang_on_a_cpu_without_its_kernels() -> None:
    found = sglang.traits(SGLANG)
    assert (found.device, found.software) == ("cpu", "SGLang 0.5.23")
    assert found.native_backend == Trait(False, "on cpu SGLang's own attention is intel_amx; it runs torch_native")
    assert found.attention_kernel.has is False
    assert found.paged_cache == Trait(True, "pages of 1 token, prefixes shared")


def test_sglang_where_it_has_kernels() -> None:
    for device, attention in (("cuda:0", "fa3"), ("cpu", "intel_amx"), ("npu", "ascend")):
        found = sglang.traits({**SGLANG, "device": device, "attention_backend": attention, "page_size": 64})
        assert (found.native_backend.has, found.attention_kernel) == (True, Trait(True, attention))
        assert found.paged_cache.what == "pages of 64 tokens, prefixes shared"
    assert sglang.traits({**SGLANG, "disable_radix_cache": True}).paged_cache.what == "pages of 1 token"


@pytest.mark.parametrize("args", [("--attention-backend", "triton"), ("--dtype", "x", "--attention-backend=triton")])
def test_what_sglang_does_not_tell_is_in_its_arguments(args: tuple[str, ...]) -> None:
    info = {**SGLANG, "attention_backend": None}
    assert sglang.traits(info, args).attention_kernel == Trait(True, "triton")
    assert sglang.traits({**SGLANG, "decode_attention_backend": "fa3"}, args).attention_kernel.what == "fa3"


@pytest.mark.parametrize("info", [{}, {"device": "tpu", "page_size": "?"}, {"device": "cpu"}])
def test_what_nobody_tells_of_sglang_is_unknown(info: dict[str, Any]) -> None:
    found = sglang.traits(info, ("--attention-backend",))
    assert (found.native_backend, found.attention_kernel, found.paged_cache) == (UNTOLD, UNTOLD, UNTOLD)
    assert sglang.traits(info, ("--attention-backend", "new")).attention_kernel == Trait(None, "new")


def test_vllm_tells_of_its_cache_by_its_metrics() -> None:
    found = openai.traits({}, "0.11.0", METRICS)
    assert (found.software, found.paged_cache) == ("vLLM 0.11.0", Trait(True, "blocks of 16 tokens, prefixes shared"))
    assert (found.native_backend, found.attention_kernel) == (UNTOLD, UNTOLD)


@pytest.mark.parametrize(
    ("info", "attention"),
    [
        (
            {"vllm_config": {"attention_config": {"backend": "AttentionBackendEnum.FLASH_ATTN"}}},
            Trait(True, "FLASH_ATTN"),
        ),
        ({"vllm_config": {}, "vllm_env": {"VLLM_ATTENTION_BACKEND": "TORCH_SDPA"}}, Trait(False, "TORCH_SDPA")),
        ({"vllm_config": "text", "vllm_env": {"A": 1}}, UNTOLD),
    ],
)
def test_vllm_tells_the_rest_in_its_development_mode(info: dict[str, Any], attention: Trait) -> None:
    assert openai.traits(info, "", "").attention_kernel == attention
    config = {"device_config": {"device_type": "cpu"}}
    assert openai.traits({"vllm_config": config}, "", "").native_backend == Trait(True, "vLLM's for cpu")


def test_sglang_behind_the_common_interface_is_known() -> None:
    assert openai.traits(SGLANG, "", "") == sglang.traits(SGLANG)


async def test_a_server_is_asked_what_it_tells() -> None:
    async def info(request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        config = {"device_config": {"device_type": "cuda"}, "attention_config": {"backend": "FLASHINFER"}}
        return web.json_response({"vllm_config": config, "vllm_env": {}})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.11.0"})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app = web.Application()
    app.add_routes([web.get("/server_info", info), web.get("/version", version), web.get("/metrics", metrics)])
    async with TestServer(app) as server, CompletionsClient(str(server.make_url("/"))) as client:
        assert await openai.ask(client) == Traits(
            device="cuda",
            software="vLLM 0.11.0",
            native_backend=Trait(True, "vLLM's for cuda"),
            attention_kernel=Trait(True, "FLASHINFER"),
            paged_cache=Trait(True, "blocks of 16 tokens, prefixes shared"),
        )


async def test_a_server_that_tells_nothing_is_unknown() -> None:
    async with CompletionServer() as server, CompletionsClient(server.url) as client:
        assert await openai.ask(client) == Traits("", "")
    assert await traits_of(object()) == Traits("", "")


def test_servers_that_differ_are_unknown() -> None:
    one, other = sglang.traits(SGLANG), sglang.traits({**SGLANG, "attention_backend": "intel_amx", "version": "0.6"})
    assert agreed([one, one]) == one
    both = agreed([one, other])
    assert both.software == "SGLang 0.5.23, SGLang 0.6"
    assert both.attention_kernel.has is None
    assert both.attention_kernel.what.startswith("the servers differ: torch_native")
    assert both.paged_cache == one.paged_cache


def test_a_processor_has_the_name_that_the_system_gives_it(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Other\n")
    assert device_name("cpu", file) == "Some CPU @ 2 GHz (cpu)"
    assert device_name("cpu", tmp_path / "none") == "cpu"
