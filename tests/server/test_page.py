"""The page at `/` in a real browser, with a real server: what it shows, and that it loads nothing from other sites."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn

from spillover.engine.output.outputs import DraftCounts
from spillover.engine.parallel.report import RanksReport
from spillover.engine.speculation.config import SpeculativeConfig
from spillover.memory.spill.report import TierReport
from spillover.server.app import make_app
from spillover.server.engine.protocol import TierUse
from spillover.server.settings import ServerSettings
from support.servers.chromium import Chromium, find_chromium
from support.servers.running_server import Server
from support.servers.stub_client import StubClient

# The contrast of every visible text with its background, worst first.
LONG = 900  # tokens: they take some seconds, and the page updates once per second
CONTRASTS = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(".hidden, .skip, noscript")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.tagName + "." + node.className + " " + node.textContent.slice(0, 30)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""


@pytest.fixture(scope="module")
def chromium() -> str:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    return program


@pytest.fixture
def server_url(chromium: str, server: Server) -> str:
    return server.url


@pytest.fixture(scope="module")
def one_browser(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(chromium, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def browser(one_browser: Chromium) -> Chromium:
    one_browser.open("about:blank")
    one_browser.problems.clear()
    one_browser.addresses.clear()
    return one_browser


@contextmanager
def stub_server(client: StubClient, *api_keys: str) -> Iterator[str]:
    """Serve the page with a stub in place of an engine."""
    settings = ServerSettings(served_model_names=("a-model",), api_keys=api_keys)
    app = make_app(client, settings)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_an_idle_server_has_friendly_empty_places(browser: Chromium) -> None:
    with stub_server(StubClient()) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').textContent === 'ready'")
        assert browser.text("#model") == "a-model"
        assert browser.text("#running") == "0"
        assert browser.evaluate("document.getElementById('banner').hidden")
        assert "No requests yet" in browser.text("#requests-empty")
        assert url in browser.text("#example")
        assert browser.evaluate("[...document.querySelectorAll('#tiers li')].map((li) => li.textContent)") == [
            "device10% in use, 20% kept, of 1 kB", "hostnot configured", "poolnot configured", "disknot configured",
            "remotenot configured"]
    assert browser.problems == []


def test_tiers_say_what_they_hold_and_what_moved(browser: Chromium) -> None:
    client = StubClient()
    host = TierReport("host", 30, 40, 5_000_000, 2_000_000, 2.0, 0.5, 64, 0, 3, True, 10e6, None)
    remote = TierReport("remote", 5, None, 70, 0, 1.0, 0.0, 0, 9, 0, False, None, None)
    tiers = (*client.stats.tiers, TierUse("host", 0, 400, 0, 300), TierUse("remote", 0, 0, 0, 50))
    client.stats = msgspec.structs.replace(client.stats, tiers=tiers, kv_tiers=(host, remote))
    with stub_server(client) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').textContent === 'ready'")
        _, host_row, _, disk_row, remote_row = browser.evaluate(
            "[...document.querySelectorAll('#tiers li')].map((li) => li.textContent)")
        assert host_row == ("host0% in use, 75% kept, of 400 Bin 5.0 MB at 2.5 MB/s (25% of link) · "
                            "out 2.0 MB at 4.0 MB/s · 64 tokens hit · 3 dropped")
        assert disk_row == "disknot configured"
        assert remote_row == "remotedoes not answerin 70 B at 70 B/s · out 0 B · 0 tokens hit · 9 failed"
    assert browser.problems == []


def check_layout(browser: Chromium, url: str, shown: str) -> None:
    """Check that the page with the element `shown` fits narrow and wide windows and is readable."""
    for width in (400, 1400):
        browser.open(url, width=width)
        browser.wait(f"document.getElementById('{shown}').checkVisibility()")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert [found for found in browser.evaluate(CONTRASTS) if found[0] < 4.5] == []


def test_speculation_is_shown_where_it_is_on_and_what_is_simulated_says_so(browser: Chromium) -> None:
    client = StubClient()
    numbers = "[...document.querySelectorAll('#speculation-numbers div')].map((div) => div.textContent)"
    with stub_server(client) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').textContent === 'ready'")
        assert not browser.evaluate("document.getElementById('speculation').checkVisibility()")
        client.info.config.speculation = SpeculativeConfig("suffix", 4)
        browser.wait("document.getElementById('speculation').checkVisibility()")
        assert browser.text("#speculation-note") == "suffix, up to 4 tokens"
        assert browser.evaluate("document.getElementById('speculation-empty').checkVisibility()")
        client.stats = msgspec.structs.replace(
            client.stats, time=3.0, drafts=DraftCounts(10, 30, 13, (8, 5)), draft_proposed=45, draft_seconds=0.5,
            verify_seconds=1.25)
        browser.wait("document.getElementById('positions').checkVisibility()")
        assert browser.evaluate(numbers) == [
            "tokens per pass2.30", "passes with a draft10", "drafted45", "verified30", "accepted13", "wasted17",
            "time in drafting500 ms", "time in verifying1.25 s"]
        client.stats = msgspec.structs.replace(client.stats, time=4.0, branches=12, branches_accepted=4)
        browser.wait("document.getElementById('speculation-numbers').textContent.endsWith('branches accepted4 of 12')")
        assert browser.evaluate("[...document.querySelectorAll('#positions li')].map((li) => li.textContent)") == [
            "80%1", "50%2", "0%3", "0%4"]
        assert browser.evaluate("document.querySelector('#speculation-stack').ariaLabel") == "accepted 43%, wasted 57%"
        client.info.config.speculation = SpeculativeConfig("simulated", 2, simulated=(0.8, 0.5))
        browser.wait("document.getElementById('speculation').textContent.includes('not measured')")
        assert [text for text in browser.evaluate(numbers) if "(simulated)" in text] == [
            "tokens per pass (simulated)2.30", "accepted (simulated)13", "wasted (simulated)17"]
        assert "(simulated)" in browser.text("#positions-title")
        check_layout(browser, url, "positions")
    assert browser.problems == []


def test_ranks_and_the_balance_of_their_experts_are_shown(browser: Chromium) -> None:
    client = StubClient()
    with stub_server(client) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').textContent === 'ready'")
        assert not browser.evaluate("document.getElementById('ranks').checkVisibility()")
        client.stats = msgspec.structs.replace(client.stats, time=3.0, ranks=RanksReport(2, 67, 3_000_000, 0.5))
        browser.wait("document.getElementById('ranks').checkVisibility()")
        assert browser.evaluate("[...document.querySelectorAll('#ranks-numbers div')].map((d) => d.textContent)") == [
            "collectives67", "sent by rank 03.0 MB", "wait of rank 0500 ms"]
        assert not browser.evaluate("document.getElementById('ranks-rows').checkVisibility()")
        experts = RanksReport(4, 67, 3, 0.5, (40, 20, 20, 20))
        client.stats = msgspec.structs.replace(client.stats, time=4.0, ranks=experts)
        browser.wait("document.getElementById('ranks-rows').checkVisibility()")
        assert browser.evaluate("[...document.querySelectorAll('#ranks-rows li')].map((li) => li.textContent)") == [
            "40%0", "20%1", "20%2", "20%3"]
        assert "the busiest rank has 1.60 times an even share" in browser.text("#ranks-title")
        check_layout(browser, url, "ranks-rows")
    assert browser.problems == []


def test_an_engine_that_is_down_is_said_plainly_and_so_is_a_server_that_went_away(browser: Chromium) -> None:
    client = StubClient()
    with stub_server(client) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').textContent === 'ready'")
        client.ready, client.engine_state = False, "dead"
        assert "engine is down" in browser.wait("!document.getElementById('banner').hidden && "
                                                "document.getElementById('banner').textContent")
        client.ready, client.engine_state = True, "sleeping"
        browser.wait("document.getElementById('banner').textContent.includes('asleep')")
        client.engine_state = "ready"
        browser.wait("document.getElementById('banner').hidden")
    browser.wait("document.getElementById('banner').textContent.includes('does not answer')")


def test_a_key_that_the_server_asks_for_is_kept_for_this_tab_only(browser: Chromium) -> None:
    with stub_server(StubClient(), "a-key") as url:
        browser.open(url)
        browser.wait("document.getElementById('banner').textContent.includes('API key')")
        browser.evaluate("document.querySelector('details').open = true; document.getElementById('key').focus()")
        browser.type("a-key")
        browser.wait("document.getElementById('state').textContent === 'ready'")
        browser.wait("document.getElementById('banner').hidden")
        assert browser.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_and_controls_have_names(browser: Chromium, server_url: str, dark: bool) -> None:
    browser.open(server_url, dark=dark)
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.evaluate("document.querySelector('details').open = true")
    contrasts = browser.evaluate(CONTRASTS)
    assert len(contrasts) > 30
    assert [found for found in contrasts if found[0] < 4.5] == []
    controls = [node for node in browser.call("Accessibility.getFullAXTree")["nodes"]
                if node.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "link")]
    assert len(controls) >= 6
    assert all(node.get("name", {}).get("value") for node in controls)


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1400, False), (400, True), (1400, True)])
def test_it_fits_small_and_large_windows(browser: Chromium, server_url: str, tmp_path: Path, width: int,
                                         dark: bool) -> None:
    ask(server_url, "Hello", 4)
    browser.open(server_url, width=width, dark=dark)
    browser.wait("document.querySelectorAll('#rows .row').length > 0")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 10_000
    assert browser.problems == []


def test_numbers_move_while_a_request_runs_and_nothing_comes_from_elsewhere(browser: Chromium, server_url: str) -> None:
    browser.open(server_url)
    browser.wait("document.getElementById('state').textContent === 'ready'")
    thread = threading.Thread(target=ask, args=(server_url, "Count to one thousand.", LONG))
    thread.start()
    browser.wait("Number(document.getElementById('running').textContent) >= 1")
    browser.wait("document.querySelector('#rows .lane.live')")
    first = browser.wait("parseFloat(document.getElementById('rate').textContent)")
    browser.wait(f"parseFloat(document.getElementById('rate').textContent) !== {first}")
    thread.join()
    browser.wait("document.getElementById('running').textContent === '0'")
    browser.wait("!document.querySelector('#rows .lane.live') && document.querySelector('#rows .lane .decode')")
    assert browser.evaluate("document.querySelector('#rows .lane.ended') !== null")
    assert browser.text("#cached") + " from cache" == browser.text("#sources-note").split(", ")[-1]
    assert "p99" in browser.text("#ttft-note")
    assert browser.text("#rows .row .num:nth-child(4)").replace(",", "") == str(LONG)
    assert browser.problems == []
    assert {httpx.URL(address).port for address in browser.addresses} == {httpx.URL(server_url).port}
    assert all(address.startswith(server_url) for address in browser.addresses)


def test_the_chat_streams_stops_and_goes_on(browser: Chromium, server_url: str) -> None:
    browser.open(server_url)
    last = "document.querySelector('#log .message:last-child')"
    browser.evaluate("document.getElementById('prompt').focus()")
    browser.evaluate("document.getElementById('temperature').value = '0'")
    browser.type("Write a long story about a river.")
    browser.press("Enter")
    seen = browser.wait(f"{last}.classList.contains('running') && {last}.querySelector('.text').textContent.length")
    browser.wait(f"{last}.querySelector('.text').textContent.length > {seen} + 20 && "
                 f"{last}.classList.contains('running')", 30)
    browser.evaluate("document.getElementById('stop').click()")
    browser.wait(f"{last}.querySelector('.note')?.textContent.includes('stopped')")
    wait_until_idle(server_url)

    browser.evaluate("document.getElementById('max-tokens').value = '8'")
    browser.evaluate("document.getElementById('prompt').focus()")
    browser.type("And what happened then?")
    browser.press("Enter")
    note = browser.wait(f"!{last}.classList.contains('running') && {last}.querySelector('.note')?.textContent", 30)
    assert "8 tokens" in note
    assert "cached" in note  # the earlier conversation was not computed again
    assert browser.evaluate("document.querySelectorAll('#log .message').length") == 4
    browser.evaluate("document.getElementById('clear').click()")
    assert browser.evaluate("document.querySelectorAll('#log .message').length") == 0
    assert browser.problems == []


def test_the_chat_folds_away_and_stays_so(browser: Chromium) -> None:
    with stub_server(StubClient()) as url:
        browser.open(url)
        wide = browser.evaluate("document.querySelector('.memory').offsetWidth")
        browser.evaluate("document.getElementById('fold').click()")
        assert not browser.evaluate("document.getElementById('prompt').checkVisibility()")
        assert browser.evaluate("document.querySelector('.memory').offsetWidth") > wide
        browser.open(url)
        assert browser.text("#fold") == "Show"
        browser.evaluate("document.getElementById('fold').click()")
        assert browser.evaluate("document.getElementById('prompt').checkVisibility()")
    assert browser.problems == []


def ask(url: str, text: str, tokens: int) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "ignore_eos": True, "temperature": 0}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def wait_until_idle(url: str) -> None:
    deadline = time.monotonic() + 5
    while httpx.get(f"{url}/live").json()["running"]:
        assert time.monotonic() < deadline, "the request goes on though its client has gone"
        time.sleep(0.05)
