"""The page in a real browser: nothing is asked for, nothing goes wrong, and it can be read on any screen."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from lt_data import TokenStore
from lt_data.display.report import write_report as write_store_report
from lt_test_helpers.browser import BrowserError, Chromium, find_browser
from lt_trainer.observability.report.run_history import read_run
from lt_trainer.observability.report.writer import write_report

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="NO BROWSER: pages are not looked at; install the Debian package chromium"
)

TOO_WIDE = """
[...document.querySelectorAll("body *")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1) &&
    !one.closest(".scroll, pre, nav, .plot svg, title") && getComputedStyle(one).position !== "fixed";
}).map((one) => `${one.tagName}.${one.className.baseVal ?? one.className} ${one.textContent.slice(0, 40)}`)
"""
SMALL_OR_PALE = """
(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map((x) => x / 255).map(
      (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const found = [];
  for (const one of document.querySelectorAll("body *:not(script):not(style):not(title)")) {
    if (![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    if (!one.getClientRects().length) continue;
    const style = getComputedStyle(one), ink = light(style.color);
    const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    if (parseFloat(style.fontSize) < 11.5 || contrast < 4.5)
      found.push(`${one.tagName} ${style.fontSize} ${contrast.toFixed(1)} ${one.textContent.slice(0, 30)}`);
  }
  return found;
})()
"""
OVERLAPS = """
[...document.querySelectorAll(".x, .y")].flatMap((axis) => {
  const boxes = [...axis.children].map((one) => one.getBoundingClientRect());
  return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right && b.left < a.right &&
    a.top < b.bottom && b.top < a.bottom)).map(() => `${axis.closest("figure").id}: ${axis.textContent}`);
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as one:
        yield one


@pytest.fixture
def pages(eventful: Path, make_run, little_data: Path, tmp_path: Path) -> dict[str, Path]:
    """The page of one run, with data, and that of two."""
    other = make_run(
        "other-with-a-rather-long-name-for-a-small-screen", overrides=[f"data.store={little_data / 'train'}"]
    )
    return {
        "one": write_report([other], tmp_path / "one.html")[0],
        "two": write_report([eventful, other], tmp_path / "two.html")[0],
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_can_be_read(browser: Chromium, pages: dict[str, Path], width: int, dark: bool) -> None:
    for name, path in pages.items():
        page = browser.open(path, width=width, dark=dark)
        page.evaluate_js("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert page.errors == [], name
        assert page.requests == [path.as_uri()], name
        assert page.evaluate_js("document.documentElement.scrollWidth") == width, name
        assert page.evaluate_js(TOO_WIDE) == [], name
        assert page.evaluate_js(SMALL_OR_PALE) == [], name
        assert page.evaluate_js(OVERLAPS) == [], name
        ground = page.evaluate_js("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")


def test_markup_that_was_not_escaped_does_nothing(
    browser: Chromium, pages: dict[str, Path], little_data: Path, tmp_path: Path
) -> None:
    """The policy of both reports: no script and no style but the page's own."""
    store = TokenStore.open(little_data / "train")
    evil = (
        "<script>document.title = 'taken'</script><p id=p style='position:fixed' onclick='document.title = 1'>text</p>"
        "<style>#p{visibility:hidden}</style><base href='https://localhost/'><form id=f action='https://localhost/'>"
    )
    for path in (pages["one"], write_store_report(store, tmp_path / "store.html")[0]):
        text = path.read_text()
        title = browser.open(path).evaluate_js("document.title")
        changed = tmp_path / "changed.html"
        changed.write_text(text.replace("<main>", f"<main>{evil}"))
        assert changed.read_text() != text
        page = browser.open(changed)
        page.evaluate_js("document.querySelector('#p').click()")
        assert page.evaluate_js("document.title") == title
        assert page.evaluate_js(
            "[getComputedStyle(document.querySelector('#p')).visibility, document.querySelector('#p').style.length]"
        ) == ["visible", 0]
        assert page.evaluate_js("document.baseURI") == changed.as_uri()
        assert page.requests == [changed.as_uri()]


def test_lines_stand_where_their_numbers_say(browser: Chromium, eventful: Path, tmp_path: Path) -> None:
    """A dot of the validation loss is where the axis has its value; both are measured in the drawn page."""
    (path,) = write_report([eventful], tmp_path / "page.html")
    page = browser.open(path)
    drawn = page.evaluate_js("""(() => {
      const figure = document.querySelector("#chart-validation");
      const box = figure.querySelector("svg").getBoundingClientRect();
      const marks = [...figure.querySelectorAll(".y span")].map((one) => {
        const at = one.getBoundingClientRect();
        return [parseFloat(one.textContent), (at.top + at.bottom) / 2];
      });
      const line = figure.querySelector("path.line").getAttribute("d").slice(1).split("L").map(
        (pair) => pair.split(" ").map(Number));
      return { box: [box.left, box.top, box.width, box.height], marks, line };
    })()""")
    (left, top, width, height), marks = drawn["box"], drawn["marks"]
    (low, low_y), (high, high_y) = marks[0], marks[-1]
    x, y = drawn["line"][1]
    assert left + width * x / 1000 == pytest.approx(left + width * 100 / 400, abs=1)
    value = low + (top + height * y / 300 - low_y) / (high_y - low_y) * (high - low)
    assert value == pytest.approx(2.6 + 7 * math.exp(-100 / 60), abs=0.03)


@pytest.mark.parametrize("width", [1280, 400])
def test_events_and_loss_have_the_same_axis(browser: Chromium, eventful: Path, tmp_path: Path, width: int) -> None:
    """A step stands at the same pixels in both, and the dots of a stop under the dotted lines of the curves."""
    (path,) = write_report([eventful], tmp_path / "page.html")
    page = browser.open(path, width=width)
    drawn = page.evaluate_js("""["#chart-loss", "#chart-events"].map((name) => {
      const figure = document.querySelector(name);
      const boxes = [...figure.querySelectorAll("svg")].map((one) => one.getBoundingClientRect());
      const marks = [...figure.querySelectorAll(".x span")].map((one) => one.getBoundingClientRect());
      return [boxes.map((box) => [box.left, box.right]), marks.map((box) => (box.left + box.right) / 2)];
    })""")
    (((left, right),), loss_marks), (lanes, event_marks) = drawn
    assert len(lanes) > 3
    assert len(loss_marks) > 2
    assert lanes == [[pytest.approx(left, abs=0.1), pytest.approx(right, abs=0.1)]] * len(lanes)
    assert event_marks == pytest.approx(loss_marks, abs=0.1)


def test_the_ruler_tells_the_values_at_its_step(browser: Chromium, eventful: Path, tmp_path: Path) -> None:
    (path,) = write_report([eventful], tmp_path / "page.html")
    page = browser.open(path, height=3000)
    box = page.evaluate_js("""(() => { const box = document.querySelector("#chart-mfu svg").getBoundingClientRect();
      return [box.left, box.top, box.width, box.height]; })()""")
    outputs = "[...document.querySelectorAll('output[data-chart]')].map((one) => one.textContent)"
    before = page.evaluate_js(outputs)
    page.move_mouse(box[0] + box[2] * 0.5, box[1] + box[3] * 0.5)
    rulers = page.evaluate_js("""[...document.querySelectorAll(".ruler")].map((one) => {
      const area = one.parentElement.querySelector("svg").getBoundingClientRect();
      return [one.hidden, (one.getBoundingClientRect().left - area.left) / area.width]; })""")
    assert rulers
    assert all(not hidden and share == pytest.approx(0.5, abs=0.005) for hidden, share in rulers)
    told = page.evaluate_js(outputs)
    assert told != before
    assert f"{100 * read_run(eventful).train[199]['mfu']:.3g}% at 200" in told
    page.move_mouse(5, 5)
    assert page.evaluate_js(outputs) == before
    assert page.evaluate_js("[...document.querySelectorAll('.ruler')].every((one) => one.hidden)")
    assert page.errors == []


def test_the_page_says_the_same_without_its_script(browser: Chromium, eventful: Path, tmp_path: Path) -> None:
    (path,) = write_report([eventful], tmp_path / "page.html")
    bare = tmp_path / "bare.html"
    text = path.read_text()
    bare.write_text(text[: text.index("<script type=application/json")] + "</body></html>")
    words = "document.querySelector('main').innerText"
    assert browser.open(bare).evaluate_js(words) == browser.open(path).evaluate_js(words)


def test_the_browser_sees_errors_and_requests(browser: Chromium, tmp_path: Path) -> None:
    """The watchman is awake: a page that raises, logs and asks is caught."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><link rel=icon href='data:,'><img src=missing.png><script>console.error('told');"
        "setTimeout(() => { throw new Error('thrown') })</script>"
    )
    page = browser.open(path)
    page.evaluate_js("new Promise((done) => setTimeout(done, 50))")
    assert any("told" in text for text in page.errors)
    assert any("thrown" in text for text in page.errors)
    assert any(address.endswith("missing.png") for address in page.requests)
    with pytest.raises(BrowserError, match="ReferenceError"):
        page.evaluate_js("nothing.here")
