"""The page in a real browser: no error, no request, filters, keys and links work, hostile text does nothing.

Needs a Chromium (Debian: `apt-get install chromium`); DSABISECT_NEEDS_CHROMIUM=1 makes its absence a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from made_events import gate_story, large_story, timeline_story
from test_html import HOSTILE, large_page

from dsabisect.report import build, html

REQUIRED = os.environ.get("DSABISECT_NEEDS_CHROMIUM") == "1"


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    program = browser.find()
    if program is None:
        message = "no Chromium: the HTML report was not looked at in a browser (Debian: apt-get install chromium)"
        if REQUIRED:
            pytest.fail(message)
        pytest.skip(message)
    with browser.Browser(program) as opened:
        yield opened


def written(folder: Path, events: list[dict[str, object]]) -> Path:
    file = folder / "report.html"
    file.write_text(html.render(build.build(events)))
    for event in events:
        if event["event"] == "observation" and event["log"]:
            log = folder / "logs" / str(event["log"])
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("what the candidate printed\n")
    return file


def visible(tab: browser.Browser, what: str) -> int:
    return int(tab.js(f"[...document.querySelectorAll({what!r})].filter(e => e.checkVisibility()).length"))


@pytest.mark.parametrize("dark", [False, True])
def test_no_error_no_request_and_the_answer_in_sight(chromium: browser.Browser, tmp_path: Path, dark: bool) -> None:
    page = written(tmp_path, gate_story())
    chromium.open(page, dark=dark)
    assert chromium.troubles == []
    assert chromium.requests == [page.as_uri()]
    assert "GATE on rope = neox" in chromium.js("document.querySelector('.advice').innerText")
    assert chromium.js("document.querySelector('.advice').getBoundingClientRect().bottom") < 600
    background = chromium.js("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 23, 26)" if dark else "rgb(255, 255, 255)")
    assert len(chromium.screenshot(tmp_path / "page.png")) > 10_000


def test_nothing_is_wider_than_a_small_window(chromium: browser.Browser, tmp_path: Path) -> None:
    chromium.open(written(tmp_path, large_story(12, 60)), width=420)
    assert chromium.js("document.documentElement.scrollWidth") <= 420


def test_filters(chromium: browser.Browser, tmp_path: Path) -> None:
    chromium.open(written(tmp_path, timeline_story()))
    assert (visible(chromium, "#full thead th"), visible(chromium, "#full tbody th")) == (7, 5)
    chromium.js("document.getElementById('bad').click()")
    assert visible(chromium, "#full thead th") == 1 + 2  # fused and default under NeoX
    chromium.js("document.getElementById('steps').click()")
    assert visible(chromium, "#full tbody th") == 4
    chromium.js("document.getElementById('bad').click(); document.getElementById('steps').click()")
    find = "(words) => { const f = document.getElementById('find'); f.value = words;"
    find += " f.dispatchEvent(new Event('input')); }"
    chromium.js(f"({find})('default neox')")
    assert (visible(chromium, "#full thead th"), visible(chromium, "#full tbody th")) == (2, 5)
    chromium.js(f"({find})('number 4')")
    assert (visible(chromium, "#full thead th"), visible(chromium, "#full tbody th")) == (7, 1)
    assert chromium.js("document.getElementById('shown').textContent") == "1 of 5 commits, 6 of 6 columns shown"
    chromium.js(f"({find})('no such thing')")
    assert visible(chromium, "#full tbody td") == 0
    chromium.js(f"({find})('')")
    assert visible(chromium, "#full tbody th") == 5
    assert chromium.troubles == []


def test_a_cell_tells_what_was_found_by_mouse_and_by_keys(chromium: browser.Browser, tmp_path: Path) -> None:
    chromium.open(written(tmp_path, gate_story()))
    chromium.js("document.querySelector('#full td.b').click()")
    told = chromium.js("document.getElementById('told').innerText")
    assert "fused/e2e-neox: bad · diverged: end_to_end diff: 0.41 > 0.0021 allowed (row 3)" in told
    assert "19524 % of what is allowed" in told
    chromium.key("ArrowLeft")
    told = chromium.js("document.getElementById('told').innerText")
    assert "fused/e2e-interleaved: good" in told
    assert chromium.js("document.activeElement.tagName") == "TD"
    assert chromium.js("document.querySelectorAll('#full td[tabindex=\"0\"]').length") == 1


def test_a_command_is_copied_whole(chromium: browser.Browser, tmp_path: Path) -> None:
    chromium.open(written(tmp_path, gate_story()))
    chromium.js("document.querySelector('button[data-copy]').click()")
    assert chromium.js("document.querySelector('button[data-copy]').textContent") in ("copied", "select + Ctrl+C")
    chosen = chromium.js("window.getSelection().toString()").splitlines()
    assert chosen[0] == "# It is good here"
    assert chosen[1].startswith("dsabisect check ")
    assert chosen[1].endswith("--device cuda:0")


def test_a_screen_reader_has_names_for_all_that_can_be_used(chromium: browser.Browser, tmp_path: Path) -> None:
    chromium.open(written(tmp_path, gate_story()))
    nodes = chromium.call("Accessibility.getFullAXTree")["nodes"]
    told = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"] and "role" in n]
    roles = ("button", "link", "searchbox", "checkbox", "grid", "table", "image", "img")
    used = [pair for pair in told if pair[0] in roles]
    assert {"button", "link", "searchbox", "checkbox", "grid", "table"} <= {role for role, _ in used}
    assert not [pair for pair in used if not pair[1].strip()]
    cells = [name for role, name in told if role == "cell"]
    assert {"bad introduced", "good", "absent"} <= set(cells)


def test_links_lead_somewhere(chromium: browser.Browser, tmp_path: Path) -> None:
    page = written(tmp_path, gate_story())
    chromium.open(page)
    links = chromium.js("[...document.querySelectorAll('a')].map(a => a.href)")
    assert len(links) > 8
    for link in links:
        address, _, fragment = link.partition("#")
        assert Path(address.removeprefix("file://")).is_file(), link
        assert not fragment or chromium.js(f"document.getElementById({fragment!r}) !== null")
    log = next(link for link in links if link.endswith(".log"))
    chromium.open(Path(log.removeprefix("file://")))
    assert "what the candidate printed" in chromium.js("document.body.innerText")


def test_hostile_text_does_nothing(chromium: browser.Browser, tmp_path: Path) -> None:
    events = gate_story(title=" ".join(HOSTILE), author=HOSTILE[1])
    for event in events:
        if event["event"] == "observation":
            event.update(detail=" ".join(HOSTILE), notes=list(HOSTILE))
        if event["event"] == "run":
            event.update(repo=HOSTILE[0], command=list(HOSTILE), environment={HOSTILE[1]: HOSTILE[2]})
    chromium.open(written(tmp_path, events))
    chromium.js("document.querySelector('#full td.b').click()")
    assert chromium.js("typeof window.hacked") == "undefined"
    assert chromium.troubles == []
    assert "<script>" in chromium.js("document.querySelector('h1').innerText")


def test_the_policy_stops_a_script_that_got_in(chromium: browser.Browser, tmp_path: Path) -> None:
    """The second lock: as if escaping had failed."""
    page = written(tmp_path, gate_story())
    page.write_text(page.read_text().replace("<main>", "<main><script>window.hacked=1</script><b onclick=x style=a>"))
    chromium.open(page)
    assert chromium.js("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in trouble for trouble in chromium.troubles)


def test_the_largest_page_stays_quick(chromium: browser.Browser, tmp_path: Path) -> None:
    (tmp_path / "large.html").write_text(large_page())
    chromium.open(tmp_path / "large.html")
    assert chromium.troubles == []
    clicked = "const t = performance.now(); document.getElementById('bad').click(); return performance.now() - t;"
    assert chromium.js(f"(() => {{ {clicked} }})()") < 3000
    assert visible(chromium, "#full thead th") == 0  # folded: more than forty columns
    chromium.js("document.querySelector('#full').closest('details').open = true")
    assert visible(chromium, "#full thead th") == 1 + 100


def test_it_prints(chromium: browser.Browser, tmp_path: Path) -> None:
    chromium.open(written(tmp_path, gate_story()))
    assert len(chromium.call("Page.printToPDF")["data"]) > 10_000
