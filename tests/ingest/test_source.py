from __future__ import annotations

import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.passages import Passage, cut
from ingest.source import MEDIA_TYPES, source
from tests.ingest.helpers import words

# For each language: a function, the first and last lines of what holds members, a member, a statement; all as written.
LANGUAGES: dict[str, tuple[str, str, str, str, str]] = {
    "text/x-python": (
        '# About it.\n@cached\n@other(\n    1\n)\ndef NAME(a):\n    """Says é."""\nBODY    return a\n',
        'class NAME(Base):\n    """Holds."""\n\n    field = 1\n\n',
        "",
        '    @property\n    async def NAME(self):\n        """Doc."""\nBODY        return 1\n',
        "    a = f(a)\n",
    ),
    "text/x-javascript": (
        "/**\n * About é.\n */\nexport const NAME = async (a) => {\nBODY    return a;\n};\n",
        "export default class NAME extends Base {\n    #field = 1;\n\n",
        "}\n",
        "    // About.\n    async NAME(a) {\nBODY        return 1;\n    }\n",
        "    f(a);\n",
    ),
    "text/x-typescript": (
        "/** About é. */\nfunction NAME<T>(a: T): T {\nBODY    return a;\n}\n",
        "@Injectable()\nexport abstract class NAME<T> implements Base {\n    private field: number = 1;\n\n",
        "}\n",
        "    @Input()\n    public NAME(a: string): void {\nBODY        return 1;\n    }\n",
        "    f(a as any);\n",
    ),
    "text/x-go": (
        "// NAME is é.\nfunc (s *Server[T]) NAME(a int) (int, error) {\nBODY\treturn a, nil\n}\n",
        "type NAME struct {\n",
        "}\n",
        "\t// A field.\n\tNAME struct {\nBODY\t}\n",
        "\tf\n",
    ),
    "text/x-rust": (
        "/// About é.\n#[inline]\n#[must_use]\npub fn NAME<T>(a: T) -> T {\nBODY    a\n}\n",
        "impl<T> Base for NAME<T> {\n    const FIELD: u8 = 1;\n\n",
        "}\n",
        "    /// Doc.\n    #[test]\n    fn NAME(&self) -> u8 {\nBODY        1\n    }\n",
        "    f(a);\n",
    ),
    "text/x-java": (
        "/** About é. */\n@Deprecated\n@Other(1)\ninterface NAME {\nBODY    int a();\n}\n",
        "public class NAME extends Base {\n    private int field = 1;\n\n",
        "}\n",
        "    /** Doc. */\n    @Override\n    public void NAME(int a) {\nBODY        f(a);\n    }\n",
        "    int b = 1;\n",
    ),
    "text/x-c": (
        "/* About é. */\nstatic const char *NAME(int a)\n{\nBODY    return a;\n}\n",
        "struct NAME {\n    int field;\n\n",
        "};\n",
        "    // About.\n    union {\nBODY        int NAME;\n    } u_NAME;\n",
        "    int a;\n",
    ),
    "text/x-cpp": (
        "// About é.\ntemplate <class T>\nT Base::NAME(T a) const {\nBODY    return a;\n}\n",
        "class NAME : public Base {\n  public:\n    int field = 1;\n\n",
        "};\n",
        "    // About.\n    void NAME(int a) override {\nBODY        f(a);\n    }\n",
        "    int b = 1;\n",
    ),
}


def test_every_language_but_json_is_tried():
    assert set(LANGUAGES) == MEDIA_TYPES - {"text/x-json"}


@st.composite
def programs(draw):
    """A media type, a program in it, and the text of each function, class and member, without blank lines around."""
    media_type = draw(st.sampled_from(sorted(LANGUAGES)))
    function, opening, closing, member, statement = LANGUAGES[media_type]
    sizes = st.integers(0, 12)
    names = iter(range(1000))
    units: list[str] = []

    def filled(template: str, indent: str = "") -> str:
        body = textwrap.indent(statement * draw(sizes), indent)
        return template.replace("NAME", f"n{next(names)}").replace("BODY", body)

    text = draw(st.sampled_from(["", "\n\n", "// é\n\n" if media_type != "text/x-python" else "# é\n\n"]))
    for is_class in draw(st.lists(st.booleans(), min_size=1, max_size=4)):
        if not is_class:
            unit = filled(function)
            units.append(unit.strip())
        else:
            members = [filled(member, "    ") for _ in range(draw(st.integers(0, 4)))]
            units += [inner.strip() for inner in members]
            unit = filled(opening) + draw(st.sampled_from(["\n", "\n\n"])).join(members) + closing
            units.append(unit.strip())
        text += unit + draw(st.sampled_from(["\n", "\n\n\n"]))
    return media_type, text, units


@given(case=programs(), max_tokens=st.integers(16, 200))
@settings(max_examples=400, deadline=None)
def test_functions_classes_and_members_that_fit_are_never_cut(case, max_tokens):
    media_type, text, units = case
    passages = cut(text, media_type, words, max_tokens)
    assert "".join(p.text for p in passages) == text
    assert all(p.kind == "code" and p.tokens == words(p.text) <= max_tokens for p in passages)
    for unit in units:
        start = text.index(unit)
        if words(text[text.rfind("\n", 0, start) + 1 : start + len(unit)]) <= max_tokens:
            assert any(p.start <= start and p.end >= start + len(unit) for p in passages), unit


def headings(text: str, media_type: str, max_tokens: int) -> list[tuple[str, str | None]]:
    return [(p.heading, p.part) for p in cut(text, media_type, words, max_tokens)]


METHODS = "".join(f"    def m{n}(self):\n        return {n} + {n}\n\n" for n in range(4))


def test_a_class_too_large_is_cut_between_methods_that_name_themselves():
    text = f'import os\n\n\nclass A(Base):\n    """Doc."""\n\n{METHODS}'
    assert headings(text, "text/x-python", 45) == [
        ("", None),
        ("A", "1/5"),
        ("A > m0", "2/5"),
        ("A > m1", "3/5"),
        ("A > m2", "4/5"),
        ("A > m3", "5/5"),
    ]


def test_a_passage_of_several_members_is_named_for_what_holds_them():
    assert headings(f"class A(Base):\n    x = 1\n\n{METHODS}", "text/x-python", 90) == [
        ("A", "1/2"),
        ("A", "2/2"),
    ]


def test_a_function_too_large_is_cut_between_statements_of_several_lines():
    loop = "    for x in y:\n        a(x)\n\n        b(x)\n"
    passages = cut("def f(y):\n" + loop * 9, "text/x-python", words, 60)
    assert [p.part for p in passages] == [f"{n}/{len(passages)}" for n in range(1, len(passages) + 1)]
    assert sum(p.text.count(loop) for p in passages) == 9


def test_a_comment_leaves_a_function_whole_that_fits_without_it():
    function = "@cached\ndef f():\n    '''Doc.'''\n    return 1\n"
    text = "# " + "word " * 12 + "\n" + function
    assert words(function.strip()) <= 30 < words(text)
    assert [p.text for p in cut(text, "text/x-python", words, 30)][-2:] == [function.strip(), "\n"]


def test_attributes_stay_with_a_function_that_fits_with_them():
    function = "#[inline]\n/* why */\n#[must_use]\nfn f() -> u8 {\n    1\n}\n"
    text = "/// " + "word " * 20 + "\n" + function
    assert words(function.strip()) <= 50 < words(text)
    assert sum(function.strip() in p.text for p in cut(text, "text/x-rust", words, 50)) == 1


def test_a_docstring_stays_with_the_first_line_of_what_is_too_large():
    head = '    @cached\n    def f(\n        a,\n    ):\n        """First.\n\n        Second.\n        """\n'
    small = "    def m(self):\n        pass\n\n"
    for fill in range(40):
        text = "class A:\n" + "    x = 1\n" * fill + small + head + "        a()\n" * 30
        assert sum(head in p.text for p in cut(text, "text/x-python", words, words(head) + 20)) == 1


def test_characters_are_counted_and_not_bytes():
    functions = [f'def f{n}():\n    """{"漢é😀" * (n + 1)}"""\n    return 1\n\n\n' for n in range(60)]
    blocks = source("".join(functions), "text/x-python")
    assert [block.end - block.start for block in blocks] == [len(function) for function in functions]


@pytest.mark.parametrize(
    ("media_type", "text", "names"),
    [
        ("text/x-go", "func (s *Server[K, V]) Run() {\n}\n", ["Server.Run"]),
        ("text/x-go", "type T struct {\n\tA int\n}\n", ["T"]),
        ("text/x-rust", "impl fmt::Display for P<T> {\n    fn fmt(&self) {}\n}\n", ["fmt::Display for P<T>"]),
        ("text/x-rust", "mod tests {\n    fn a() {\n    }\n\n    fn b() {\n    }\n}\n", ["tests > a", "tests > b"]),
        ("text/x-cpp", "namespace a { namespace b {\nvoid f() {\n}\n}}\n", ["a > b > f"]),
        ("text/x-cpp", "int *A::b(int c) {\n}\n", ["A::b"]),
        ("text/x-c", "#ifndef A_H\n#define A_H\nint f(void) {\n}\n#endif\n", ["f"]),
        ("text/x-typescript", "export namespace N {\n    function f() {\n    }\n}\n", ["N > f"]),
        ("text/x-javascript", "const f = () => {\n};\n", ["f"]),
        ("text/x-javascript", "const data = [\n    1,\n];\n", [""]),
        ("text/x-java", "class A {\n    enum B {\n    }\n}\n", ["A"]),
        ("text/x-json", '{\n  "a": {\n    "b": 1\n  },\n  "c": {\n    "d": 1\n  }\n}\n', ["a", "c"]),
    ],
)
def test_definitions_are_named(media_type, text, names):
    blocks = list(source(text, media_type))
    assert [" > ".join(block.path) for block in blocks if block.path or names == [""]] == names


def parts(passages: list[Passage]) -> list[str]:
    return [p.text for p in passages]


def test_short_statements_are_one_block_and_definitions_their_own():
    parts = ["import a\nimport b\n", "def f():\n    return 1\n", "x = 1\ny = 2\n\n", "z = 3\n"]
    text = "".join(parts)
    assert [text[block.start : block.end] for block in source(text, "text/x-python")] == parts


def test_an_include_guard_does_not_make_one_block_of_a_header():
    functions = [f"int f{n}(void)\n{{\n    return {n};\n}}\n\n" for n in range(5)]
    text = "#ifndef A_H\n#define A_H\n\n" + "".join(functions) + "#endif\n"
    passages = cut(text, "text/x-c", words, 30)
    assert {p.part for p in passages} == {None}
    assert [p.heading for p in passages if "return" in p.text] == [f"f{n}" for n in range(5)]


@pytest.mark.parametrize(
    "text", ["class A {\n public:\n  void f();\n};\n", "template <class T>\nT f(T a) {\n  return a;\n}\n"]
)
def test_a_header_may_be_cpp(text):
    assert cut(text, "text/x-c", words, 500)[0].heading in ("A", "f")


def test_tsx_and_typed_javascript_are_parsed():
    text = "function App(): JSX.Element {\n  return (\n    <div>\n      {a}\n    </div>\n  );\n}\n"
    for media_type in ("text/x-typescript", "text/x-javascript"):
        assert cut(text, media_type, words, 500)[0].heading == "App"


def test_json_is_cut_between_members_and_elements():
    record = '{"name": "a", "tags": ["x", "y"]}'
    pretty = '[\n  {\n    "name": "a"\n  },\n' * 1 + '  {\n    "name": "b"\n  }\n]\n'
    assert [p.part for p in cut(pretty, "text/x-json", words, 25)] == [None] * 2
    for text in (f"[{','.join([record] * 20)}]", "\n".join([record] * 20)):
        passages = cut(text, "text/x-json", words, 60)
        assert len(passages) > 5
        assert sum(p.text.count(record) for p in passages) == 20


def test_minified_code_is_cut_between_statements():
    function = "function f(a){var b=a+1;return b*2}"
    text = function * 60
    assert sum(p.text.count(function) for p in cut(text, "text/x-javascript", words, 60)) == 60


def test_broken_code_still_joins_and_keeps_what_parses_whole():
    good = "def g():\n    return 1\n"
    text = "def f(:\n  x = = 1\n)))\n\n\n" + good + "\n\nclass {{{\n"
    passages = cut(text, "text/x-python", words, 30)
    assert "".join(parts(passages)) == text
    assert sum(good in p.text for p in passages) == 1


CODE_LINES = st.sampled_from(
    [
        *(line for template in LANGUAGES.values() for part in template for line in part.split("\n")),
        "}",
        "{",
        "/*",
        "*/",
        "'''",
        '"""',
        "#if X",
        "#else",
        "#endif",
        "é = '漢'",
        "\ud800",
        "\0",
        "a\rb",
        "\u2028\x0c",
    ]
)


@given(
    lines=st.lists(CODE_LINES, max_size=30),
    media_type=st.sampled_from(sorted(MEDIA_TYPES)),
    max_tokens=st.integers(16, 60),
)
@settings(max_examples=400, deadline=None)
def test_any_text_is_cut_without_loss(lines, media_type, max_tokens):
    text = "\n".join(lines)
    passages = cut(text, media_type, words, max_tokens)
    assert "".join(parts(passages)) == text
    assert all(p.text == text[p.start : p.end] and p.tokens <= max_tokens for p in passages)


@pytest.mark.parametrize("media_type", sorted(MEDIA_TYPES))
@pytest.mark.parametrize(
    "text",
    ["[" * 20_000, "{" * 20_000, "(" * 20_000, "a+" * 10_000, "if (a) { " * 5_000, "/*" * 10_000, '"' * 20_001],
    ids=["lists", "bodies", "brackets", "operators", "blocks", "comments", "quotes"],
)
def test_hostile_code_costs_seconds_at_most(media_type, text):
    start = time.monotonic()
    passages = cut(text, media_type, lambda piece: len(piece) // 4 + 1, 256)
    assert "".join(parts(passages)) == text
    assert time.monotonic() - start < 10


def test_functions_are_named_by_what_they_are_assigned_to():
    text = "app.use = function use(fn) {\n  return fn\n}\n\nexports.a = (x) => {\n  return x\n}\n\nx.y = f(\n  1\n)\n"
    assert [block.path for block in source(text, "text/x-javascript")] == [("app.use",), ("exports.a",), ()]
    text = "typedef struct erow {\n  int idx;\n} erow;\n"
    assert [block.path for block in source(text, "text/x-c")] == [("erow",)]


def test_a_documentation_comment_may_have_a_blank_line_below_it():
    text = "/** Starts it. */\n\nfunction start() {\n  go()\n}\n"
    assert [text[block.start : block.end] for block in source(text, "text/x-javascript")] == [text]
    for other in ("/* A section. */\n\n", "/** Far away. */\n\n\n"):
        assert len(source(text.replace("/** Starts it. */\n\n", other), "text/x-javascript")) == 2
