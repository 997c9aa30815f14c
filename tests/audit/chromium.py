"""A page in a real Chromium without network, as a phone or a desktop shows it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PORT_LINE = b"DevTools listening on "


class Tab:
    """One tab, by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        """All that it told by itself."""

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            said = json.loads((await self._socket.receive()).data)
            if said.get("id") == number:
                assert "error" not in said, said
                return dict(said["result"])
            self.events.append(said)

    async def open(self, file: Path, width: int, *, dark: bool = False) -> None:
        """Show a file as wide as a phone (below 600) or a desktop."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.ask(f"{domain}.enable")
        await self.ask(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        phone = width < 600
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])
        await self.ask("Page.navigate", url=file.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads((await self._socket.receive()).data))

    async def value(self, expression: str) -> Any:
        found = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def screenshot(self) -> bytes:
        """Of the whole page, as PNG."""
        taken = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What the browser says is wrong with the page."""
        return [event["params"]["entry"]["text"] for event in self.events if event["method"] == "Log.entryAdded"]


@asynccontextmanager
async def tab(profile: Path) -> AsyncIterator[Tab]:
    assert BINARY is not None, "there is no Chromium here; on Debian: apt install chromium"
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    browser = await asyncio.create_subprocess_exec(
        BINARY,
        *options,
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        address = await _address(browser)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as answer:
                pages = [page for page in await answer.json() if page["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        browser.terminate()
        await browser.communicate()


async def _address(browser: asyncio.subprocess.Process) -> str:
    assert browser.stderr is not None
    async for line in browser.stderr:
        if line.startswith(_PORT_LINE):
            return line.removeprefix(_PORT_LINE + b"ws://").partition(b"/")[0].decode()
    raise AssertionError("Chromium ended before it listened")
