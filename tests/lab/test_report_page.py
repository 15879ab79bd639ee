"""The page of a report in a real browser: it draws, reacts, is readable in light and dark, and loads nothing else.

The numbers are made up (`made_up_results`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spillover.lab.report.data import read_report
from spillover.lab.report.figures import Figure, Line, LineFigure, Panel, figures
from spillover.lab.report.html import render
from support.lab.made_up_results import write_results
from support.servers.chromium import Chromium, find_chromium

pytest.importorskip("pyarrow")

# The contrast of every visible text with its background, worst first. SVG text is painted by `fill`.
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
    if (!own || !node.checkVisibility() || node.closest(".skip, noscript, script, .tip, :disabled")) continue;
    const style = getComputedStyle(node);
    const ink = rgb(node.tagName === "text" ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.tagName + "." + node.className + " " + node.textContent.slice(0, 30)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    with Chromium(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    evil = "Made-up numbers. </script><script>document.title = 'taken'</script>"
    folder = write_results(tmp_path_factory.mktemp("lab") / "made-up", rates=(2, 8), blocks=5, about=evil)
    report = read_report(folder)
    path = folder / "report.html"
    path.write_text(render(report, figures(report)))
    return path


def open_page(browser: Chromium, page: Path, width: int = 1280, dark: bool = False) -> None:
    browser.open("about:blank")
    browser.problems.clear()
    browser.addresses.clear()
    browser.open(page.as_uri(), width=width, dark=dark)
    browser.wait("document.documentElement.dataset.drawn === '8'")


def test_every_figure_is_drawn_and_nothing_comes_from_elsewhere(browser: Chromium, page: Path) -> None:
    open_page(browser, page)
    browser.wait("[...document.querySelectorAll('figure .plot')].every((plot) => plot.childElementCount)")
    assert browser.evaluate("document.querySelectorAll('figure svg').length") == 6
    assert browser.evaluate("document.querySelectorAll('#split .stack-row').length") == 12
    assert "NaN" not in browser.evaluate("document.querySelector('main').innerHTML")
    assert browser.evaluate("document.title") == "made-up - Spillover lab"
    assert browser.problems == []
    assert set(browser.addresses) == {page.as_uri()}


def test_the_first_screen_holds_the_verdict(browser: Chromium, page: Path) -> None:
    open_page(browser, page)
    row = browser.evaluate("document.querySelector('.verdict[data-arm=host]').getBoundingClientRect().bottom")
    assert row < 900
    assert browser.text(".verdict[data-arm=host] .badge") == "faster"
    assert browser.text(".verdict[data-arm=warm] .badge") == "no verdict"
    assert browser.evaluate("document.querySelector('.verdict[data-arm=warm] .dot') === null")


def test_an_arm_that_is_switched_off_leaves_every_figure(browser: Chromium, page: Path) -> None:
    open_page(browser, page)
    count = "document.querySelectorAll('#curves path').length"
    before = browser.wait(count)
    browser.evaluate("document.querySelector('.arm[data-arm=host]').click()")
    assert browser.wait(count) == before - 1
    assert browser.evaluate("document.querySelector('.arm[data-arm=host]').ariaPressed") == "false"
    assert browser.evaluate("[...document.querySelectorAll('#sources .stack-row')]"
                            ".every((row) => !row.textContent.includes('host'))")
    browser.evaluate("document.querySelectorAll('.arm:not(:disabled)').forEach((button) => "
                     "button.ariaPressed === 'true' && button.click())")
    assert "switched off" in browser.text("#curves .plot")
    browser.evaluate("document.querySelector('.arm[data-arm=device]').click()")
    assert browser.wait(count) == 1


def test_pointing_tells_the_value_and_dragging_zooms(browser: Chromium, page: Path) -> None:
    open_page(browser, page)
    browser.evaluate("document.querySelector('#itl').scrollIntoView({block: 'center', behavior: 'instant'})")
    left, top, width, height = browser.evaluate(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('#itl svg')"
        ".getBoundingClientRect())")
    middle = top + height / 2

    def mouse(kind: str, share: float) -> None:
        browser.call("Input.dispatchMouseEvent", type=kind, x=left + share * width, y=middle, button="left",
                     buttons=int(kind != "mouseReleased"), clickCount=1)

    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width / 2, y=middle)
    browser.wait("!document.querySelector('.tip').hidden")
    assert "time in the run" in browser.text(".tip")
    assert " ms" in browser.text(".tip")
    mouse("mousePressed", 0.3)
    mouse("mouseMoved", 0.5)
    mouse("mouseReleased", 0.5)
    browser.wait("!document.querySelector('#itl .choices .quiet:last-child').hidden")
    labels = "[...document.querySelectorAll('#itl svg text')].map((text) => text.textContent).join(' ')"
    zoomed = browser.evaluate(labels)
    browser.evaluate("document.querySelector('#itl .choices .quiet:last-child').click()")
    assert browser.evaluate(labels) != zoomed


def test_a_workload_chosen_in_one_figure_is_chosen_in_all(browser: Chromium, page: Path) -> None:
    open_page(browser, page)
    browser.evaluate("""(() => { const select = document.querySelector('#ttft select');
        select.value = 'rates@request-rate=8'; select.dispatchEvent(new Event('change')); })()""")
    assert browser.evaluate("document.querySelector('#itl select').value") == "rates@request-rate=8"
    assert browser.evaluate("document.querySelector('#runs select').value") == "rates@request-rate=8"
    assert browser.evaluate("document.querySelector('#itl svg').ariaLabel").startswith(
        "Gaps between tokens over time, rates@request-rate=8")


def test_tables_sort_by_value_not_by_text(browser: Chromium, page: Path) -> None:
    open_page(browser, page)
    browser.evaluate("[...document.querySelectorAll('.sort')].find((button) => button.textContent === "
                     "'median TTFT, ms').click()")
    values = browser.evaluate("""[...[...document.querySelectorAll('.sort')].find((button) => button.ariaSort)
        .closest('table').tBodies[0].rows].map((row) => row.cells[2].dataset.value).filter(Boolean).map(Number)""")
    assert len(values) == 4
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_and_controls_have_names(browser: Chromium, page: Path, dark: bool) -> None:
    open_page(browser, page, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach((details) => details.open = true)")
    contrasts = browser.evaluate(CONTRASTS)
    assert len(contrasts) > 200
    assert [found for found in contrasts if found[0] < 4.5] == []
    controls = [node for node in browser.call("Accessibility.getFullAXTree")["nodes"]
                if node.get("role", {}).get("value") in ("button", "combobox", "link", "image")]
    assert len(controls) > 20
    assert all(node.get("name", {}).get("value") for node in controls)


# For every line plot: how far texts exceed the picture, and how far lines exceed the ticks of the axis, in pixels.
OUTSIDE = """(() => [...document.querySelectorAll("figure svg")].map((svg) => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
  const beyond = Math.max(...texts.flatMap((box) => [frame.left - box.left, box.right - frame.right,
                                                      frame.top - box.top]));
  const ends = [...svg.querySelectorAll("line.grid")].map((line) => [line.y1.baseVal.value, line.y2.baseVal.value]);
  const heights = ends.filter(([from, to]) => from === to).map(([from]) => from);
  const shapes = [...svg.querySelectorAll("g > path, g > circle")].map((shape) => shape.getBBox());
  const above = Math.max(...shapes.map((box) => Math.min(...heights) - box.y - (box.width < 9 ? box.height / 2 : 0)));
  return [svg.ariaLabel, beyond, above];
}))()"""


def scaled(figure: Figure, factor: float) -> Figure:
    """Return the same picture with the numbers of another machine; shares stay shares."""
    if not isinstance(figure, LineFigure):
        return figure
    def line(one: Line, panel: Panel) -> Line:
        x, y = (1.0 if axis.unit not in ("ms", "tok/s", "B") else factor for axis in (panel.x, panel.y))
        return replace(one, points=tuple((x * px, y * py) for px, py in one.points),
                       upper=tuple(y * value for value in one.upper))

    return replace(figure, panels=tuple(replace(panel, lines=tuple(line(one, panel) for one in panel.lines))
                                        for panel in figure.panels))


@pytest.mark.parametrize("width", [400, 1280])
def test_lines_stay_on_their_axes_and_marks_in_the_picture(browser: Chromium, page: Path, tmp_path: Path,
                                                           width: int) -> None:
    report = read_report(page.parent)
    drawn = figures(report)
    seen = set()
    for factor in (0.013, 1.0, 10_000 / 5_600, 4_321.0):
        path = tmp_path / "scaled.html"
        path.write_text(render(report, [scaled(figure, factor) for figure in drawn]))
        open_page(browser, path, width=width)
        for label, beyond, above in browser.wait(OUTSIDE):
            assert beyond <= 0.5, (factor, label)
            assert above <= 1.5, (factor, label)
        seen.update(browser.evaluate("[...document.querySelectorAll('#ttft svg text')].map((text) => "
                                     "text.textContent)"))
    assert "10,000" in seen


def test_every_plot_names_what_it_draws(browser: Chromium, page: Path) -> None:
    open_page(browser, page)
    browser.wait("[...document.querySelectorAll('figure .plot')].every((plot) => plot.childElementCount)")
    legends = browser.evaluate("[...document.querySelectorAll('figure')].map((figure) => [figure.id, "
                               "[...figure.querySelectorAll('.legend li')].map((item) => item.textContent)])")
    assert len(legends) == 8
    for key, names in legends:
        if key not in ("split", "sources"):
            assert names == ["device (baseline)", "host", "warm", "slow"], key
    browser.evaluate("document.querySelector('.arm[data-arm=host]').click()")
    assert "host" not in browser.text("#rate .legend")


def test_a_table_that_is_wider_than_the_window_says_so(browser: Chromium, page: Path) -> None:
    hints = "[...document.querySelectorAll('.scroll')].filter((box) => box.checkVisibility()).map((box) => " \
            "[box.scrollWidth > box.clientWidth + 1, box.previousElementSibling.checkVisibility()])"
    for width, scrolls in ((400, True), (1400, False)):
        open_page(browser, page, width=width)
        found = browser.wait(hints)
        assert any(wide for wide, _ in found) == scrolls
        assert all(wide == told for wide, told in found)


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_it_fits_small_and_large_windows(browser: Chromium, page: Path, tmp_path: Path, width: int) -> None:
    open_page(browser, page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.screenshot(tmp_path / "page.png").stat().st_size > 20_000
    assert browser.problems == []


def test_without_scripts_the_verdict_and_the_tables_are_there(browser: Chromium, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open("about:blank")
        browser.open(page.as_uri())
        assert browser.text(".verdict[data-arm=host] .badge") == "faster"
        assert "plots/" in browser.text("noscript")
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") > 10
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
