"""From the key press to the first token on the screen: `python -m tests.benchmarks.page [URL] [-n 12]`.

Against a server that runs; needs Chromium. Every question goes to one session without retrieval, so that it is the
page and the way to the model that are measured; `server` is what the server says of the same turns (`first_token`, from
when it accepted them), and `page` the rest. Prints milliseconds.
"""

from __future__ import annotations

import shutil
import statistics

import click
from playwright.sync_api import Page, sync_playwright

# The moment is taken where it is seen: in the frame after the one that puts the text into the document.
_WATCH = """() => {
    window.shown = null;
    const place = document.getElementById('turns');
    const pressed = new Promise((press) => addEventListener('keydown', () => press(performance.now()), {once: true}));
    const written = new Promise((write) => {
        const watcher = new MutationObserver(() => {
            if (!place.querySelector('.is-running .answer')?.textContent) return;
            watcher.disconnect();
            requestAnimationFrame(() => setTimeout(() => write(performance.now())));
        });
        watcher.observe(place, {childList: true, subtree: true, characterData: true});
    });
    Promise.all([pressed, written]).then(([from, to]) => { window.shown = to - from; });
}"""


@click.command()
@click.argument("url", default="http://127.0.0.1:8765")
@click.option("-n", "questions", default=12)
def main(url: str, questions: int) -> None:
    """Measure the page that `url` serves."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.add_init_script(
            "localStorage.setItem('keepwhole:asking:new', JSON.stringify({top_k: 0, max_tokens: 16, temperature: 0}))"
        )
        page.goto(f"{url}/")
        page.wait_for_selector(".welcome")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        click.echo(f"first contentful paint {paint:.0f} ms")
        shown, server = zip(*(_ask(page, f"What is {n} and {n}?") for n in range(1, questions + 1)), strict=True)
        for name, values in (("key press to token", shown), ("server", server)):
            click.echo(f"{name}: median {statistics.median(values):.0f}, worst {max(values):.0f} ms")
        click.echo(f"page: median {statistics.median(a - b for a, b in zip(shown, server, strict=True)):.0f} ms")
        browser.close()


def _ask(page: Page, question: str) -> tuple[float, float]:
    """Milliseconds to the first token: on the screen, and at the server."""
    turns = page.locator(".turn-footer").count()
    page.fill("#ask", question)
    page.evaluate(_WATCH)
    page.press("#ask", "Enter")
    page.wait_for_function("n => window.shown && document.querySelectorAll('.turn-footer').length > n", arg=turns)
    server = page.evaluate("import('./page/store.js').then((store) => store.state.turns.at(-1).timings.first_token)")
    return page.evaluate("window.shown"), 1000 * server


if __name__ == "__main__":
    main()
