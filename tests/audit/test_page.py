"""The report as a page: whole in itself, and readable in a real browser at a phone's width."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from audit import svg
from audit.analysis import analyse
from audit.page import MOST_LANES, page
from tests.audit.chromium import BINARY, tab
from tests.audit.simulated import simulated

LINE = {
    "service": "trainer", "lane": "trainer", "pid": 1, "begin": 0.0, "end": 10.0, "cpu_s": 9.0,
    "phases": {"forward_backward": {"seconds": 4.0, "flop": 2e12, "bytes": 1e9}},
    "roofline": {"flop_per_s": 1e12, "bytes_per_s": 1e10},
}  # fmt: skip
RUN = replace(simulated(decode_s=[0.4, 0.6], steps=12, train_s=0.4), intensity=(LINE,))
HEADINGS = [
    "What to change next",
    "Critical path",
    "Figures",
    "Producers that the measured rates call for",
    "Phases of each lane",
    "Idle by reason over time",
    "Lag of what was trained on",
    "Weight-sync latency",
    "Reward against device-hours",
    "Intensity, beside how long it took",
    "Signs that kernels are not what to tune next",
]
needs_browser = pytest.mark.skipif(
    BINARY is None and not os.environ.get("HEADRACE_TEST_ALL_SERVERS"), reason="there is no Chromium here"
)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline"):
            assert self.open.pop() == tag


def test_it_asks_for_nothing_from_elsewhere() -> None:
    text = page(analyse(RUN))
    tags = Tags(text)
    assert tags.open == []
    assert not {tag for tag, _ in tags.seen} & {"script", "link", "img", "iframe", "object"}
    assert not [
        value
        for _, attrs in tags.seen
        for name, value in attrs.items()
        if name in ("src", "href") or "://" in (value or "")
    ]
    assert "url(" not in text
    assert "@import" not in text


def test_what_a_run_is_called_is_text() -> None:
    text = page(analyse(replace(RUN, run_id="<script>alert(1)</script>")))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_names_in_plots_are_text_too() -> None:
    drawn = svg.bars([("<b>", {"<i>": 1.0})], "s", '"<u>')
    assert not {"<b>", "<i>", '"<u>"', '"<u>'} & set(re.findall(r'"?<[biu]>"?', drawn))


def test_a_run_of_many_lanes_stays_readable() -> None:
    many = tuple(replace(RUN.lanes[1], service=f"producer-{n}") for n in range(3 * MOST_LANES))
    text = page(analyse(replace(RUN, lanes=(RUN.lanes[0], *many))))
    assert re.search(r"\d+ more lanes, their mean", text)


def test_a_producer_that_was_replaced_has_a_bar_for_each_process() -> None:
    again = replace(RUN.lanes[1], pid=77)
    marked = replace(RUN, lanes=(*RUN.lanes, again), estimated=frozenset({("producer-1", "engine")}))
    assert page(analyse(marked)).count("producer-1, engine (phases estimated)</text>") == 2


def test_ticks_are_round() -> None:
    assert svg._ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert svg._ticks(0.0, 0.031, 4) == [0.0, 0.01, 0.02, 0.03]
    assert svg._ticks(3.0, 3.0) == [3.0]


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
async def test_it_reads_well_in_a_browser(width: int, tmp_path: Path) -> None:
    file = tmp_path / "audit.html"
    file.write_text(page(analyse(RUN)))
    async with tab(tmp_path / "profile") as shown:
        await shown.open(file, width, dark=width > 600)
        assert await shown.value("document.documentElement.scrollWidth") <= width
        headings = await shown.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
        assert headings == HEADINGS
        # Nothing that is read is smaller than 10 pixels, and no plot is empty.
        sizes = await shown.value(
            "[...document.querySelectorAll('svg')].map(e => 11 * e.getBoundingClientRect().width / 360)"
        )
        assert len(sizes) == 7
        assert min(sizes) >= 9.5
        assert await shown.value("[...document.querySelectorAll('svg')].every(e => e.querySelectorAll('title').length)")
        cells = await shown.value(
            "[...document.querySelectorAll('td, p, li, h1, h2')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(cells) >= 12
        picture = await shown.screenshot()
    assert shown.requests() == [file.as_uri()]
    assert shown.complaints() == []
    assert len(picture) > 10_000
    if kept := os.environ.get("HEADRACE_TEST_SCREENSHOTS"):
        Path(kept, f"audit-{width}.png").write_bytes(picture)  # noqa: ASYNC240 - for a person who looks at it
