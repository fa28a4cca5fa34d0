"""The page in Debian's Chromium, against a real server."""

from __future__ import annotations

import csv
import http.client
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.app.service import Service

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.service,
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]

Open = Callable[..., Page]
# A small model's words do not matter here, its time does.
SHORT = """if (!localStorage.getItem('keepwhole:asking:new'))
    localStorage.setItem('keepwhole:asking:new', JSON.stringify({max_tokens: 12, top_k: 3}))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, service: Service) -> Iterator[Open]:
    """Opens the page at an address; at the end, nothing may have gone elsewhere or been complained of."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def open(hash: str = "", url: str | None = None, refused: bool = False, **options: Any) -> Page:
        url = url or f"{service.url}/"
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        contexts.append(context)
        context.add_init_script(SHORT)
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith((url, "blob:")) else faults.append(request.url)
        )

        def note(message: Any) -> None:
            # That an answer was 401 or 404, or broke off, is what some tests are about.
            if message.type in ("error", "warning") and not (refused and "Failed to load" in message.text):
                faults.append(message.text)

        page.on("console", note)
        page.goto(f"{url}{hash}")
        return page

    expect.set_options(timeout=30_000)
    yield open
    for context in contexts:
        context.close()
    assert faults == []


def ask(page: Page, question: str) -> None:
    """Ask and wait for the end."""
    turns = page.locator(".turn-footer").count()
    page.get_by_role("textbox", name="Ask", exact=True).fill(question)
    page.keyboard.press("Enter")
    expect(page.locator(".turn-footer")).to_have_count(turns + 1)


def session_of(page: Page) -> str:
    found = re.search(r"sessions/(ses_\w+)", page.url)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def crowded(service: Service) -> str:
    """A session whose budget is full, with blocks that left."""
    session = service.session(title="Ferries", budget_tokens=256)
    for town in ("Bodo", "Narva", "Tarifa", "Galway"):
        assert service.tell(session, f"When does the ferry to {town} leave?", max_tokens=12, top_k=2).status_code == 200
    return session


def test_answers_a_question_and_opens_its_source_at_the_passage(service: Service, open_page: Open) -> None:
    page = open_page()
    ask(page, "When does the ferry to Bodo leave?")

    turn = page.locator(".turn")
    expect(turn.locator(".answer")).to_contain_text("Bodo")
    expect(page.locator("#announcements")).to_contain_text("Done")
    expect(page).to_have_title(re.compile("^When does the ferry to Bodo leave"))
    turn.get_by_role("button", name="Source 1").click()
    source = page.get_by_role("tabpanel", name="Source")
    expect(source.locator(".passage.marked")).to_contain_text("ferry")
    expect(source.locator(".found")).to_contain_text("By its wordsno. ")
    page.reload()
    expect(page.locator(".turn .answer.prose")).to_contain_text("Bodo")
    expect(source.locator(".passage.marked")).to_be_visible()
    assert [message["role"] for message in service.items(f"/v1/sessions/{session_of(page)}/messages")] == [
        "user",
        "assistant",
    ]


def test_an_edited_question_is_asked_in_a_copy(service: Service, open_page: Open) -> None:
    page = open_page()
    ask(page, "When does the ferry to Narva leave?")
    first = session_of(page)
    page.locator(".turn").hover()
    page.get_by_role("button", name="Edit and ask in a copy").click()
    page.get_by_role("textbox", name="Edit the question").fill("How much is a ticket to Narva?")
    page.get_by_role("textbox", name="Edit the question").press("Enter")

    page.wait_for_url(lambda url: "ses_" in url and first not in url)
    expect(page.locator(".question-text")).to_have_text(["How much is a ticket to Narva?"])
    expect(page.locator(".turn-footer")).to_have_count(1)
    assert service.http.get(f"/v1/sessions/{session_of(page)}").json()["forked_from"] == first
    assert service.items(f"/v1/sessions/{first}/messages")[0]["content"] == "When does the ferry to Narva leave?"


def test_stops_an_answer_and_keeps_what_there_is(open_page: Open) -> None:
    page = open_page()
    page.evaluate("localStorage.setItem('keepwhole:asking:new', JSON.stringify({max_tokens: 400, top_k: 0}))")
    page.get_by_role("textbox", name="Ask", exact=True).fill("Write a long story about a dragon and a lighthouse.")
    page.keyboard.press("Enter")
    expect(page.locator(".is-running .answer")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".ended")).to_have_text("Stopped")
    expect(page.locator("#announcements")).to_have_text("Stopped")


def test_the_map_moves_with_the_events_and_tells_why(open_page: Open, crowded: str) -> None:
    page = open_page(f"#/sessions/{crowded}")
    bar, shelf = page.locator("#budget-bar > li"), page.locator(".shelf > li")
    expect(page.locator(".turn-footer").last).to_be_visible()
    expect(shelf.first).to_be_visible()
    before = bar.evaluate_all("blocks => blocks.map((block) => block.block.id)")

    ask(page, "How much is a ticket to Lecce?")

    assert bar.evaluate_all("blocks => blocks.map((block) => block.block.id)") != before
    assert (
        page.evaluate("document.querySelector('#budget-bar').getBoundingClientRect().width")
        >= sum(bar.evaluate_all("blocks => blocks.map((block) => block.getBoundingClientRect().width)")) - 1
    )
    shelf.first.get_by_role("button").click()
    story = page.locator(".story")
    expect(story.locator(".sentence")).to_contain_text(re.compile(r"In turn \d+.* it left because .* of \d+ in line"))
    expect(story.locator(".facts")).to_contain_text("evi_")
    expect(story.locator(".history li").first).to_contain_text(re.compile("Read|Recalled|Written"))
    bar.first.get_by_role("button").hover()
    expect(page.get_by_role("tooltip")).to_contain_text("System prompt")


def test_goes_back_to_what_was_seen_then(service: Service, open_page: Open, crowded: str) -> None:
    page = open_page(f"#/sessions/{crowded}")
    first = service.http.get(f"/v1/sessions/{crowded}/turns").json()["items"][0]["id"]
    then = [
        item["id"] for item in service.http.get(f"/v1/sessions/{crowded}/cache", params={"turn": first}).json()["items"]
    ]
    ids = "blocks => blocks.map((block) => block.block.id)"
    expect(page.locator("#budget-bar > li").first).to_be_visible()
    now = page.locator("#budget-bar > li").evaluate_all(ids)

    page.locator(".turn").first.hover()
    page.locator(".turn").first.get_by_role("button", name="What did the model see then?").click()

    expect(page.locator(".moment-note")).to_contain_text("after turn 1")
    assert page.locator("#budget-bar > li").evaluate_all(ids) == then != now
    assert f"moment={first}" in page.url
    page.get_by_role("slider").press("ArrowRight")
    expect(page.locator(".moment-note")).to_contain_text("after turn 2")
    page.get_by_role("button", name="Back to now").first.click()
    expect(page.locator(".moment-note")).to_have_count(0)
    assert page.locator("#budget-bar > li").evaluate_all(ids) == now


def test_the_log_is_filtered_and_exported(service: Service, open_page: Open, crowded: str) -> None:
    page = open_page(f"#/sessions/{crowded}?panel=log")
    rows = page.locator(".log-table tbody tr")
    evictions = service.items(f"/v1/sessions/{crowded}/evictions")
    expect(rows).to_have_count(len(evictions))
    page.get_by_label("Every kind").select_option("question")
    expect(rows).to_have_count(sum(row["kind"] == "question" for row in evictions))
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    exported = list(csv.DictReader(download.value.path().open()))
    assert [row["id"] for row in exported] == [row["id"] for row in evictions if row["kind"] == "question"]
    page.get_by_label("Every kind").select_option("")
    page.get_by_role("tab", name="Figures").click()
    expect(page.locator(".chart")).to_have_count(5)
    page.get_by_text("As a table").click()
    turns = service.http.get(f"/v1/sessions/{crowded}/turns").json()["items"]
    expect(page.locator(".figure-table tbody tr")).to_have_count(len(turns))


def test_uploads_files_and_says_what_could_not_be_read(open_page: Open) -> None:
    page = open_page("#/documents")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose files").click()
    chooser.value.set_files(
        [
            {"name": "otters.md", "mimeType": "text/markdown", "buffer": b"# Otters\n\nOtters sleep holding hands.\n"},
            {"name": "broken.pdf", "mimeType": "application/pdf", "buffer": b"no PDF at all"},
        ]
    )
    expect(page.locator(".upload.is-done")).to_contain_text("otters.md")
    expect(page.locator(".upload.is-failed .upload-error")).not_to_be_empty()
    expect(page.get_by_role("link", name="otters.md")).to_be_visible()
    page.get_by_label("Search in the documents").fill("holding hands")
    page.locator(".hit", has_text="otters.md").click()
    expect(page.locator(".passage.marked")).to_contain_text("holding hands")
    page.get_by_label("Search in the documents").fill("")
    page.get_by_role("button", name="Actions for otters.md").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("link", name="otters.md")).to_have_count(0)


def test_sessions_are_renamed_found_and_deleted(service: Service, open_page: Open) -> None:
    session = service.session(title="Plain title")
    page = open_page(f"#/sessions/{session}")
    page.locator("#top").get_by_role("button", name="Session actions").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.get_by_role("textbox", name="Title").fill("Zanzibar plans")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="Zanzibar plans")).to_be_visible()
    page.get_by_label("Search sessions").fill("zanzibar")
    expect(page.locator(".session")).to_have_count(1)
    page.locator("#top").get_by_role("button", name="Session actions").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator(".session")).to_have_count(0)
    assert service.http.get(f"/v1/sessions/{session}").status_code == 404


def test_everything_by_keyboard(open_page: Open, crowded: str) -> None:
    page = open_page(f"#/sessions/{crowded}")
    expect(page.locator(".turn-footer").last).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_role("textbox", name="Ask", exact=True)).to_be_focused()
    page.keyboard.type("draft")
    page.reload()
    expect(page.get_by_role("textbox", name="Ask", exact=True)).to_have_value("draft")
    expect(page.locator(".turn-footer").last).to_be_visible()
    page.keyboard.press("[")
    expect(page.locator(".moment-note")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".moment-note")).to_have_count(0)
    page.keyboard.press("k")
    expect(page.locator(".session > a:focus")).to_have_count(1)
    page.locator("#budget-bar button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator(".story")).to_be_visible()


def test_a_refusal_names_the_field_and_keeps_the_question(open_page: Open) -> None:
    page = open_page(refused=True)
    page.evaluate("localStorage.setItem('keepwhole:asking:new', JSON.stringify({max_tokens: 999999}))")
    page.get_by_role("textbox", name="Ask", exact=True).fill("How far is it?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens")
    expect(page.get_by_role("textbox", name="Ask", exact=True)).to_have_value("How far is it?")


def test_fits_a_phone(open_page: Open, crowded: str) -> None:
    page = open_page(f"#/sessions/{crowded}", viewport={"width": 390, "height": 844}, has_touch=True)
    expect(page.locator("#budget-bar")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for name, shown in (("Memory", ".block-row"), ("Documents", ".document-table"), ("Chat", ".turn-footer")):
        page.get_by_role("navigation", name="Views").get_by_role("link", name=name).tap()
        expect(page.locator(shown).last).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(open_page: Open, crowded: str, scheme: str) -> None:
    # Finished motion: a colour half-way is no fault.
    page = open_page(color_scheme=scheme, reduced_motion="reduce")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    views = {
        "": ".welcome",
        f"#/sessions/{crowded}": ".block-row.is-offloaded",
        f"#/sessions/{crowded}?panel=log": ".log-table tbody tr",
        f"#/sessions/{crowded}?panel=figures": ".chart",
        "#/documents": ".document-table",
        "#/documents?query=ferry": ".hit",
    }
    found: list[str] = []
    for hash, shown in views.items():
        page.evaluate("hash => { location.hash = hash }", hash)
        expect(page.locator(shown).first).to_be_visible()
        found += serious(page, hash)
    page.evaluate("hash => { location.hash = hash }", f"#/sessions/{crowded}")
    page.locator(".block-row.is-offloaded button").first.click()
    expect(page.locator(".history li").first).to_be_visible()
    found += serious(page, "story")
    page.locator(".source").first.click()
    expect(page.locator(".passage.marked")).to_be_visible()
    found += serious(page, "source")
    assert found == []


def serious(page: Page, view: str) -> list[str]:
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{view}: {violation['id']} {node['target']} {node['failureSummary']}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_draws_only_what_is_near_of_a_long_session(open_page: Open, crowded: str) -> None:
    page = open_page()
    turns = [
        {"id": f"trn_{i}", "number": i, "status": "done", "question": f"Question {i}", "answer": "*word* " * 80}
        | {"finish_reason": "stop", "sources": [], "usage": None, "timings": None, "cache": None, "problem": None}
        | {"created_at": "2026-01-01T00:00:00.000Z", "finished_at": "2026-01-01T00:00:00.000Z"}
        for i in range(1, 251)
    ]

    def long(route: Route) -> None:
        route.fulfill(json={"items": turns, "next_cursor": None})

    page.route("**/turns?*", long)
    page.goto(f"{page.url.split('#')[0]}#/sessions/{crowded}")
    expect(page.locator("#trn_250 em").first).to_be_visible()
    assert page.locator(".turn").count() == 250
    assert page.locator(".turn .answer.prose").count() < 40
    page.evaluate("document.querySelector('#trn_1').scrollIntoView()")
    expect(page.locator("#trn_1 em").first).to_be_visible()


MARKDOWN = """# Title

A *b* **c** `d` [e](https://example.com) [f](javascript:alert(1)) <img src=x onerror=alert(1)> ![g](https://h.example/i.png)

- one
  - two
- three

1. first

```py
x = "<b>"
```

| a | b |
|---|--:|
| 1 | 2 |

> said
"""


def test_markdown_makes_nodes_and_never_markup(open_page: Open) -> None:
    page = open_page()
    html = page.evaluate(
        """async (text) => {
            const { render } = await import('./page/markdown.js');
            const place = document.createElement('div');
            for (let end = 1; end <= text.length; end++) render(place, text.slice(0, end));
            const whole = document.createElement('div');
            render(whole, text);
            if (whole.isEqualNode(place) === false) return 'what grew differs from what came at once';
            for (const button of whole.querySelectorAll('button, .code-bar span')) button.remove();
            return whole.innerHTML.replace(/ (tabindex|role|aria-label|class|title|target|rel)="[^"]*"/g, '');
        }""",
        MARKDOWN,
    )
    assert "<img" not in html
    assert re.findall(r'href="([^"]*)"', html) == ["https://example.com", "https://h.example/i.png"]
    for part in (
        "<h3>Title</h3>",
        "<em>b</em> <strong>c</strong> <code>d</code>",
        "<li>one<ul><li>two</li></ul></li>",
        '<ol start="1"><li>first</li></ol>',
        '<pre><code>x = "&lt;b&gt;"</code></pre>',
        "<td>1</td><td>2</td>",
        "<blockquote><p>said</p></blockquote>",
    ):
        assert part in html


def test_is_served_with_a_policy_and_asked_for_again_cheaply(service: Service) -> None:
    page = service.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    again = service.http.get("/", headers={"If-None-Match": f'"other", W/{page.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert service.http.get("/page/style.css").headers["content-type"].startswith("text/css")
    assert service.http.get("/page/page.py").status_code == 404
    # All that the page names is there, and nothing is there that it does not name.
    named = set(re.findall(r'(?:href|src)="page/([\w.]+)"', page.text))
    folder = Path(__file__).parents[3] / "app" / "web" / "page"
    assert {*named, "index.html"} == {file.name for file in folder.iterdir()}


@contextmanager
def proxied(target: str) -> Iterator[tuple[str, list[int]]]:
    """A reverse proxy under /kw/. Yields its address, and a list: each number in it cuts one answer to a question off
    after so many bytes."""
    cuts: list[int] = []

    class Proxy(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            upstream = http.client.HTTPConnection(httpx.URL(target).host, httpx.URL(target).port or 80)
            upstream.request(self.command, self.path.removeprefix("/kw"), body or None, dict(self.headers))
            answer = upstream.getresponse()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            left = cuts.pop() if cuts and self.command == "POST" and self.path.endswith("/messages") else 1 << 40
            while left > 0 and (some := answer.read1(1 << 16)):
                self.wfile.write(some)
                self.wfile.flush()
                left -= len(some)
            upstream.close()

        do_GET = do_POST = do_DELETE = do_PATCH = pass_on

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/kw/", cuts
    finally:
        server.shutdown()
        server.server_close()


def test_asks_for_a_key_behind_a_prefix_and_resumes_a_broken_stream(tmp_path: Path, open_page: Open) -> None:
    service = Service(tmp_path, API_KEY="secret")
    try:
        with proxied(service.url) as (url, cuts):
            page = open_page(url=url, refused=True)
            dialog = page.get_by_role("dialog", name="API key")
            dialog.get_by_label("API key", exact=True).fill("wrong")
            dialog.get_by_role("button", name="Open").click()
            expect(dialog.get_by_role("alert")).to_be_visible()
            dialog.get_by_label("API key", exact=True).fill("secret")
            dialog.get_by_role("button", name="Open").click()
            expect(dialog).to_have_count(0)
            cuts.append(1)
            page.evaluate(
                """() => {
                    const place = document.getElementById('announcements');
                    window.said = [];
                    new MutationObserver(() => window.said.push(place.textContent)).observe(place, {childList: true});
                }"""
            )
            ask(page, "What is the colour of the sky?")
            assert "Connection lost, resuming" in page.evaluate("window.said")
            answer = page.locator(".turn .answer").inner_text()
            page.reload()
            expect(page.locator(".turn .answer.prose")).to_have_text(answer)
            assert not cuts
    finally:
        service.stop()
