from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ingest.documents import read_upload
from ingest.errors import Unsupported
from ingest.passages import cut
from ingest.readers.html import read_html


def markdown(body: str) -> str:
    return read_html("a.html", body)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<h1>A <em>b</em>\n c</h1><p>One\n  two&nbsp;<b>three</b> &lt;x&gt;", "# A b c\n\nOne two three <x>\n"),
        ("<h2>Install<a class=headerlink href='#i'>¶</a></h2>x", "## Install\n\nx\n"),
        ("<p>a<br>b<br/>c</p>", "a\nb\nc\n"),
        ("<ul><li>a<li>b<ul><li>c</ul><li>d</ul>", "- a\n- b\n  - c\n- d\n"),
        ("<ol start=9><li>a<li><p>b<p>c</ol>d", "9. a\n10. b\n\n    c\n\nd\n"),
        ("<blockquote><p>a<p>b</blockquote>c", "> a\n>\n> b\n\nc\n"),
        ("<ul><li><pre>x\n\ny</pre></ul>", "- ```\n  x\n\n  y\n  ```\n"),
        ("<pre><code class='language-py'>\n  a &lt; b\n\n\tc\n</code></pre>", "```py\n  a < b\n\n\tc\n```\n"),
        ("<div class='highlight-rust'><div><pre>f()<br>g()</pre></div></div>", "```rust\nf()\ng()\n```\n"),
        ("<pre>```\nx\n```</pre>", "````\n```\nx\n```\n````\n"),
        ("<p>Use <code>x * y</code> or <a href='http://a.b'>this</a><img alt='a cat'>", "Use `x * y` or this a cat\n"),
        (
            "<table><caption>T</caption><tr><th>a<th>b|c<tr><td>1<br>2</table>",
            "T\n\n| a | b\\|c |\n| --- | --- |\n| 1 2 |  |\n",
        ),
        (
            "<table><tr><th>a<th>b<tr><td>x<td><ul><li>1<li>2</ul></table>",
            "| a | b |\n| --- | --- |\n| x | • 1 • 2 |\n",
        ),
        (
            "<table><tr><th colspan=2>a<th>b<tr><td rowspan=2>1<td>2<td>3<tr><td>4<td>5<tr><td colspan=99>6</table>",
            "| a |  | b |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n|  | 4 | 5 |\n| 6 |  |  |\n",
        ),
        ("<p><input type=checkbox checked>a <input type=checkbox>b <input type=checkbox name=c>c", "☒ a ☐ b c\n"),
        ("<table><tr><td><ul><li>x</ul><td>y</table>", "- x\n\ny\n"),
        (f"<table><tr><td>{'word ' * 200}<br><br>end</table>", f"{'word ' * 199}word\n\nend\n"),
        ("<table><tr><td>a<td><td>b<tr><td><td><td><tr><td>c<td><td>", "| a | b |\n| --- | --- |\n| c |  |\n"),
        ("<p>a<br>b<br> <br>c", "a\nb\n\nc\n"),
        ("<table><tr><td><h1>A</h1><td><ul><li>x</ul></table>", "# A\n\n- x\n"),
        ("<script>var x</script><style>p{}</style><!-- c --><svg><text>s</text></svg><p hidden>h</p>x", "x\n"),
        ("<title>The &amp; page</title><h2>A</h2>", "# The & page\n\n## A\n"),
        ("<title>The page</title><h1>A</h1>", "# A\n"),
        ("<h1>Menu</h1><nav>x</nav><main><h2>A</h2>b</main><footer>c</footer>", "## A\n\nb\n"),
        ("<title>T</title><h1>Menu</h1><main><p>b</main>", "# T\n\nb\n"),
        ("<main>a</main><main>b</main>", "a\n\nb\n"),
        ("<dl><dt>a<dd>b</dl>", "a\n\nb\n"),
        ("<p>hyphen&shy;ated", "hyphenated\n"),
        ("<p><code></code>a</p><li></li>", "a\n"),
    ],
)
def test_html_becomes_markdown(html, expected):
    assert markdown(html) == expected


LOOKS_LIKE_MARKUP = [
    "# a",
    "- a",
    "+ a",
    "* a",
    "12. a",
    "3) a",
    "> a",
    "```",
    "~~~ x",
    "| a |",
    "---",
    "* * *",
    "<div>",
]
LOOKS_LIKE_MARKUP += ["[a]: b", "===", "--|--", "####### a", "-", "1.", "&amp;copy;"]


@pytest.mark.parametrize("text", LOOKS_LIKE_MARKUP)
def test_text_that_looks_like_markup_stays_a_paragraph(text):
    source = markdown(f"<p>before<br>{text.replace('<', '&lt;')}<br>after</p><p>{text.replace('<', '&lt;')}</p>")
    tokens = MarkdownIt("commonmark").enable("table").parse(source)
    assert [token.type for token in tokens if token.nesting >= 0 and token.level == 0] == ["paragraph_open"] * 2


def test_passages_of_html_have_headings_and_kinds():
    html = b"<title>T</title><h1>A</h1><p>text<h2>B</h2><table><tr><th>x<tr><td>1</table><pre>y</pre>"
    upload = read_upload("a.html", html, max_bytes=10_000)
    passages = cut(upload.text, upload.media_type, lambda text: len(text.split()), 16)
    assert "".join(p.text for p in passages) == upload.text
    assert [p.heading for p in passages] == ["A", "A > B"]


def test_a_page_is_decoded_as_it_declares():
    html = '<meta charset="shift_jis"><p>テスト</p>'
    assert read_upload("a.html", html.encode("shift_jis"), max_bytes=10_000).text == "テスト\n"


@pytest.mark.parametrize("html", ["just text", "a < b and c > d", "# Markdown\n\ntext"])
def test_text_without_a_tag_is_no_html(html):
    with pytest.raises(Unsupported, match=r"a\.html.*no tag"):
        markdown(html)


PIECES = st.sampled_from(
    ["<p>", "</p>", "<ul>", "<ol>", "<li>", "</ul>", "</ol>", "<table>", "<tr>", "<td>", "</table>", "<pre>", "</pre>",
     "<blockquote>", "</blockquote>", "<h2>", "</h2>", "<code>", "<br>", "<a>", "<div>", "</div>", "<!--", "-->",
     "word ", "# x ", "- y ", "`", "```", "|", "&#10;", "漢", "<script>", "</script>", "<template>", "<svg>", "</svg>"]
)  # fmt: skip


@given(pieces=st.lists(PIECES, max_size=40))
@settings(max_examples=400, deadline=None)
@example(pieces=["</li>", "</blockquote>", "<li>", "</ul>"])
def test_any_html_is_read(pieces):
    text = markdown("<p>" + "".join(pieces))
    assert "\r" not in text
    passages = cut(text, "text/html", len, 40)
    assert "".join(p.text for p in passages) == text


@given(
    pieces=st.lists(
        st.sampled_from(["<ul><li>", "<ol><li>", "<blockquote>", "<p>", "<h3>", "<div>", "<td>"]), max_size=12
    )
)
@settings(max_examples=200, deadline=None)
def test_no_word_is_lost_or_read_twice(pieces):
    html = "<p>" + "".join(f"{piece} w{n}x " for n, piece in enumerate(pieces))
    text = markdown(html)
    assert [word for word in text.split() if word.startswith("w")] == [f"w{n}x" for n in range(len(pieces))]


@pytest.mark.parametrize("tag", ["<div>", "<b>", "<ul><li>", "<blockquote>", "<table><td>", "<p><a><i>", "<x-y>"])
def test_deep_pages_cost_seconds_at_most(tag):
    start = time.monotonic()
    assert markdown(tag * 2000 + "word").split().count("word") == 1
    assert time.monotonic() - start < 10


def test_pages_too_deep_are_refused_before_they_are_parsed():
    start = time.monotonic()
    with pytest.raises(Unsupported, match=r"'200000 elements within each other' is not accepted; the limit is 5000"):
        markdown("<div>" * 200_000 + "word")
    assert markdown("<p>a<br><li>" * 20_000)
    assert time.monotonic() - start < 10


def test_spans_made_to_grow_do_not_take_long():
    started = time.process_time()
    text = markdown(f"<table>{'<tr><td colspan=100 rowspan=100>x<td rowspan=100>y' * 1000}</table>")
    assert text.count("x") == 1000
    assert time.process_time() - started < 10
