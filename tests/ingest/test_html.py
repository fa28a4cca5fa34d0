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
        ("<p>Use <code>x * y</code> or <a href='#b'>this</a><img alt='a cat'>", "Use `x * y` or this a cat\n"),
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
        ("<dl><dt>--depth<dd>How deep.</dd><dd>Default four.</dd></dl>", "--depth\n\nHow deep.\n\nDefault four.\n"),
        ("<p>Fee <s>5 euros</s> <span style='text-decoration:line-through'>6</span> 7", "Fee ~~5 euros~~ ~~6~~ 7\n"),
        ("<p>a</p><del><p>Dogs are allowed.</p></del><p>b <del>c</del>", "a\n\nb ~~c~~\n"),
        (
            "<table><tr><th>a<th>b<tr><td><s>1</s><td>10<sup>6</sup></table>",
            "| a | b |\n| --- | --- |\n| ~~1~~ | 10^6 |\n",
        ),
        ("<p>4 * 10<sup>-3</sup>, 10<sup>6</sup>, 2<sup>10</sup>, m<sup>2</sup>", "4 * 10^-3, 10^6, 2^10, m^2\n"),
        ("<p>x<sup>n+1</sup>, SO<sub>4</sub><sup>2-</sup>, Na<sup>+</sup>", "x^(n+1), SO4^(2-), Na^+\n"),
        ("<p>the 1<sup>st</sup>, n<sup>o</sup>, Name<sup>®</sup>, word<sup>[1]</sup>", "the 1st, no, Name®, word[1]\n"),
        ("<p>in 2020<sup><a href='#fn1'>1</a></sup>", "in 2020[1]\n"),
        ("<p>C<sub>6</sub>H<sub>12</sub>, log<sub>2</sub>8, x<sub>max</sub>", "C6H12, log_2 8, x_max\n"),
        ("<ol><li>a<li value=5>b<li>c</ol>", "1. a\n5. b\n6. c\n"),
        ("<p><ruby>漢字<rp>(</rp><rt>かんじ</rt><rp>)</rp></ruby>です", "漢字です\n"),
        ("<p>so <math alttext='E=mc^2'><mi>E</mi></math> holds", "so E=mc^2 holds\n"),
        ("<p>He said <q>yes</q>.", 'He said "yes".\n'),
    ],
)
def test_html_becomes_markdown(html, expected):
    assert markdown(html) == expected


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p><a href='https://a.b/c?d=1'>The plan</a> is here", "[The plan](https://a.b/c?d=1) is here\n"),
        ("<h2><a href='https://a.b'>Title</a></h2>", "## [Title](https://a.b)\n"),
        ("<p><a href='https://a.b/'>https://a.b</a> <a href='mailto:m@a.b'>m@a.b</a>", "https://a.b m@a.b\n"),
        ("<p><a href='mailto:m@a.b'>Mira</a>", "[Mira](mailto:m@a.b)\n"),
        ("<p><a href='https://a.b/x_(y)'>z</a>", "[z](<https://a.b/x_(y)>)\n"),
        ("<p><a href='c.html'>c</a> <a href='#d'>d</a> <a href='javascript:f()'>e</a>", "c d e\n"),
        ("<nav><a href='https://a.b'>A</a></nav><p><code><a href='https://a.b/str'>str</a></code>", "A\n\n`str`\n"),
        ("<a href='https://a.b'><h3>Card</h3><p>text</p></a>", "### Card\n\ntext\n"),
        ("<table><tr><th>a<th>b<tr><td><a href='https://a.b/c|d'>1</a><td>2</table>",
         "| a | b |\n| --- | --- |\n| [1](https://a.b/c%7Cd) | 2 |\n"),
        (f"<p><a href='https://a.b/{'x' * 400}'>t</a>", "t\n"),
    ],
)  # fmt: skip
def test_links_keep_the_addresses_that_a_reader_would_want(html, expected):
    assert markdown(html) == expected


FUNCTION = ["def total(rows):", "    result = 0", "", "    for row in rows:", "        result += row.price"]


@pytest.mark.parametrize(
    "line",
    [
        "<div class='ec-line'><div class='code'><span>{}</span></div></div>",
        "<span style='display:block'><span class='n'>{n}</span>{}</span>",
        "<span class='line'>{}</span>",
        "<span class='line'><a class='lineno'> {n} </a>{}\n</span>",
        "{}<br>",
    ],
    ids=["blocks", "numbered blocks", "by style sheet", "numbered", "breaks"],
)
def test_code_keeps_its_lines_however_they_are_marked_up(line):
    lines = [
        line.format(text or ("" if "\n" in line or "<br>" in line else "\n"), n=n) for n, text in enumerate(FUNCTION, 1)
    ]
    if "class='line'>{}" in line:
        lines = [line.format(text) for text in FUNCTION if text]
    expected = [text for text in FUNCTION if text or "class='line'>{}" not in line]
    assert markdown(f"<pre data-language=python><code>{''.join(lines)}</code></pre>") == "\n".join(
        ["```python", *expected, "```", ""]
    )


def test_numbers_beside_code_are_no_code_of_their_own():
    html = "<table><tr><td><pre>1\n2\n3</pre><td><pre>a\nb\nc</pre></table>"
    assert markdown(html) == "```\na\nb\nc\n```\n"
    assert markdown("<pre>1 a\n2 b</pre>") == "```\n1 a\n2 b\n```\n"


def test_what_tabs_and_folds_hide_is_read():
    html = (
        "<ul role=tablist><li role=tab>npm<li role=tab>brew</ul><div role=tabpanel><pre>npm i</pre></div>"
        "<div role=tabpanel hidden><pre>brew i</pre></div><div hidden=until-found><p>folded</div><div hidden>no</div>"
    )
    assert markdown(html) == "- npm\n- brew\n\n```\nnpm i\n```\n\n```\nbrew i\n```\n\nfolded\n"


def test_pictures_that_hold_text_which_is_not_read_are_told():
    warnings: list[str] = []
    read_html("a", "<p>x<svg><text>s</text></svg><img src=a><img src=b alt=''><img src=c>", warnings)
    assert warnings == ["1 drawing (SVG) with text", "2 pictures without a description"]


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
