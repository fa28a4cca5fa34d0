"""What Word documents hold beside plain paragraphs: fields, numbers, drawings, documents within them."""

from __future__ import annotations

import io
import zipfile

import pytest

from ingest.documents import Upload, read_upload
from ingest.errors import Unsupported

SPACES = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
    "wp": "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing",
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "c": "http://schemas.openxmlformats.org/drawingml/2006/chart",
    "dgm": "http://schemas.openxmlformats.org/drawingml/2006/diagram",
    "pic": "http://schemas.openxmlformats.org/drawingml/2006/picture",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
    "wpg": "http://schemas.microsoft.com/office/word/2010/wordprocessingGroup",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "v": "urn:schemas-microsoft-com:vml",
    "o": "urn:schemas-microsoft-com:office:office",
}
ALL = " ".join(f'xmlns:{prefix}="{space}"' for prefix, space in SPACES.items())
OFFICE = SPACES["r"]


def word(body: str, parts: dict[str, str | bytes] | None = None, links: dict[str, str] | None = None) -> bytes:
    """A Word document of `body`, with further parts, and links to parts by their ids."""
    related = "".join(f'<Relationship Id="{id}" Type="{OFFICE}/x" Target="{to}"/>' for id, to in (links or {}).items())
    files: dict[str, str | bytes] = {
        "_rels/.rels": f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="rId1" Type="{OFFICE}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/_rels/document.xml.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/'
        f'relationships">{related}'
        f'<Relationship Id="n" Type="{OFFICE}/numbering" Target="numbering.xml"/>'
        f'<Relationship Id="s" Type="{OFFICE}/styles" Target="styles.xml"/></Relationships>',
        "word/document.xml": f"<w:document {ALL}><w:body>{body}</w:body></w:document>",
        **(parts or {}),
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def read(body: str, parts: dict[str, str | bytes] | None = None, links: dict[str, str] | None = None) -> Upload:
    return read_upload("a.docx", word(body, parts, links), max_bytes=10_000_000)


def p(text: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{run(text)}</w:p>"


def run(text: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t xml:space='preserve'>{text}</w:t></w:r>"


@pytest.mark.parametrize(
    "inside",
    [
        "<w:fldSimple w:instr='MERGEFIELD number'>{}</w:fldSimple>",
        "<w:fldSimple w:instr='IF'><w:fldSimple w:instr='SEQ'>{}</w:fldSimple></w:fldSimple>",
        "<w:dir w:val='rtl'>{}</w:dir>",
        "<w:bdo w:val='rtl'>{}</w:bdo>",
        "<w:smartTag>{}</w:smartTag>",
        "<w:customXml>{}</w:customXml>",
        "<w:notKnownYet>{}</w:notKnownYet>",
        "<w:sdt><w:sdtContent>{}</w:sdtContent></w:sdt>",
        "<w:r><w:ruby><w:rt><w:r><w:t>reading</w:t></w:r></w:rt><w:rubyBase>{}</w:rubyBase></w:ruby></w:r>",
        "<w:del>" + run("gone").replace("w:t", "w:delText") + "</w:del><w:ins>{}</w:ins>",
    ],
)
def test_text_inside_fields_and_the_like_is_read(inside):
    body = f"<w:p>{run('Contract ')}{inside.format(run('KR-2210-B'))}{run(' between')}</w:p>"
    assert read(body).text == "Contract KR-2210-B between\n"


def test_struck_out_and_raised_text_is_marked_whether_by_itself_or_by_its_style():
    styles = (
        f"<w:styles {ALL}><w:style w:type='character' w:styleId='Old'><w:rPr><w:strike/></w:rPr></w:style>"
        "<w:style w:type='character' w:styleId='Up'><w:rPr><w:vertAlign w:val='superscript'/></w:rPr></w:style>"
        "</w:styles>"
    )
    up = "<w:vertAlign w:val='superscript'/>"
    runs = [run("5,000", "<w:strike/>"), run(" "), run("6,000", "<w:dstrike/>"), run(" "),
            run("6,500", "<w:rStyle w:val='Old'/>"), run(" 7,000 at 10"), run("6", up), run(" and 10"),
            run("-3", "<w:rStyle w:val='Up'/>")]  # fmt: skip
    text = read(f"<w:p>{''.join(runs)}</w:p>", {"word/styles.xml": styles}).text
    assert text == "~~5,000~~ ~~6,000~~ ~~6,500~~ 7,000 at 10^6 and 10^-3\n"


def level(index: int, format: str, text: str, more: str = "") -> str:
    inside = f"<w:start w:val='1'/><w:numFmt w:val='{format}'/>{more}<w:lvlText w:val='{text}'/>"
    return f"<w:lvl w:ilvl='{index}'>{inside}</w:lvl>"


NUMBERING = f"""<w:numbering {ALL}>
<w:abstractNum w:abstractNumId='0'>{level(0, "decimal", "%1.", "<w:pStyle w:val='Heading1'/>")}
{level(1, "decimal", "%1.%2", "<w:pStyle w:val='Heading2'/>")}</w:abstractNum>
<w:abstractNum w:abstractNumId='1'>{level(0, "decimal", "%1.")}{level(1, "lowerLetter", "(%2)")}
{level(2, "upperRoman", "%3)")}</w:abstractNum>
<w:abstractNum w:abstractNumId='2'>{level(0, "bullet", "•")}</w:abstractNum>
<w:num w:numId='1'><w:abstractNumId w:val='0'/></w:num>
<w:num w:numId='2'><w:abstractNumId w:val='1'/></w:num>
<w:num w:numId='3'><w:abstractNumId w:val='1'/><w:lvlOverride w:ilvl='0'><w:startOverride w:val='7'/></w:lvlOverride>
</w:num>
<w:num w:numId='4'><w:abstractNumId w:val='2'/></w:num>
</w:numbering>"""
STYLES = f"""<w:styles {ALL}>
<w:style w:type='paragraph' w:styleId='Heading1'><w:name w:val='heading 1'/>
<w:pPr><w:numPr><w:numId w:val='1'/></w:numPr></w:pPr></w:style>
<w:style w:type='paragraph' w:styleId='Heading2'><w:name w:val='heading 2'/><w:basedOn w:val='Heading1'/></w:style>
</w:styles>"""


def clause(text: str, number: int, at: int = 0) -> str:
    return p(text, f"<w:numPr><w:ilvl w:val='{at}'/><w:numId w:val='{number}'/></w:numPr>")


def heading(text: str, depth: int) -> str:
    return p(text, f"<w:pStyle w:val='Heading{depth}'/>")


def test_headings_and_lists_keep_the_numbers_that_word_shows():
    body = [
        heading("Definitions", 1), heading("Terms", 2), heading("Payment", 1), heading("Invoices", 2),
        heading("Late", 2), clause("The client may end it:", 2), clause("with notice;", 2, 1), clause("deep", 2, 2),
        clause("deeper", 2, 2), clause("at once.", 2, 1), p("Notice must be in writing."),
        clause("The supplier too.", 2),
        clause("once more", 2, 1), p("Another list"), clause("from seven", 3), clause("on", 3), clause("bullet", 4),
    ]  # fmt: skip
    upload = read("".join(body), {"word/numbering.xml": NUMBERING, "word/styles.xml": STYLES})
    assert upload.text == (
        "# 1. Definitions\n\n## 1.1 Terms\n\n# 2. Payment\n\n## 2.1 Invoices\n\n## 2.2 Late\n\n"
        "1. The client may end it:\n   - (a) with notice;\n     - I) deep\n     - II) deeper\n   - (b) at once.\n\n"
        "Notice must be in writing.\n\n2. The supplier too.\n   - (a) once more\n\n"
        "Another list\n\n7. from seven\n8. on\n\n- bullet\n"
    )


def test_han_numerals_and_leading_zeros_are_counted():
    numbering = (
        f"<w:numbering {ALL}><w:abstractNum w:abstractNumId='0'>{level(0, 'chineseCounting', '第%1条')}"
        f"{level(1, 'decimalZero', '%1-%2', '<w:isLgl/>')}</w:abstractNum>"
        "<w:num w:numId='1'><w:abstractNumId w:val='0'/></w:num></w:numbering>"
    )
    body = "".join(clause("x", 1) for _ in range(12)) + clause("y", 1, 1)
    lines = read(body, {"word/numbering.xml": numbering}).text.splitlines()
    assert (lines[0], lines[9], lines[11], lines[12].strip()) == (
        "- 第一条 x",
        "- 第十条 x",
        "- 第十二条 x",
        "- 12-1 y",
    )


DRAWING = (
    "<w:p><w:r><w:drawing><wp:inline><wp:docPr id='1' name='x' descr='{descr}'/><a:graphic>{graphic}</a:graphic>"
    "</wp:inline></w:drawing></w:r></w:p>"
)


def drawing(graphic: str, uri: str = "", descr: str = "") -> str:
    return DRAWING.format(descr=descr, graphic=f"<a:graphicData uri='{uri}'>{graphic}</a:graphicData>")


BOX = f"<wps:wsp><wps:txbx><w:txbxContent>{p('boxed')}</w:txbxContent></wps:txbx></wps:wsp>"
OLD_BOX = (
    f"<w:r><w:pict><v:oval><v:textbox><w:txbxContent>{p('boxed')}</w:txbxContent></v:textbox></v:oval></w:pict></w:r>"
)


@pytest.mark.parametrize(
    "body",
    [
        drawing(BOX),
        drawing(f"<wpg:wgp>{BOX}</wpg:wgp>"),
        f"<w:p>{OLD_BOX}</w:p>",
        f"<w:p><w:r><mc:AlternateContent><mc:Choice>{drawing(BOX)[10:-12]}</mc:Choice><mc:Fallback>"
        f"{OLD_BOX[5:-6]}</mc:Fallback></mc:AlternateContent></w:r></w:p>",
        f"<w:p><w:r><mc:AlternateContent><mc:Choice>{drawing(BOX)[10:-12]}</mc:Choice></mc:AlternateContent></w:r></w:p>",
    ],
    ids=["box", "in a group", "old", "both", "no fallback"],
)
def test_text_boxes_are_read_once(body):
    assert read(p("before") + body + p("after")).text == "before\n\nboxed\n\nafter\n"


def test_smart_art_is_its_texts():
    points = "".join(
        f"<dgm:pt><dgm:t><a:p><a:r><a:t>{t}</a:t></a:r></a:p></dgm:t></dgm:pt>" for t in ("Plan", "Do", "")
    )
    parts = {"word/diagrams/data1.xml": f"<dgm:dataModel {ALL}><dgm:ptLst>{points}</dgm:ptLst></dgm:dataModel>"}
    uri = "http://schemas.openxmlformats.org/drawingml/2006/diagram"
    body = drawing("<dgm:relIds r:dm='d'/>", uri)
    upload = read(body, parts, {"d": "diagrams/data1.xml"})
    assert (upload.text, upload.warnings) == ("Plan\n\nDo\n", [])
    assert read(p("x") + body).warnings == ["1 SmartArt drawing"]


def test_a_chart_is_its_title_and_a_table_of_its_data():
    def cached(name: str, values: list[str]) -> str:
        points = "".join(f"<c:pt idx='{n}'><c:v>{v}</c:v></c:pt>" for n, v in enumerate(values))
        return f"<c:{name}><c:strRef><c:strCache>{points}</c:strCache></c:strRef></c:{name}>"

    series = "".join(
        f"<c:ser>{cached('tx', [name])}{cached('cat', ['North', 'South'])}{cached('val', values)}</c:ser>"
        for name, values in (("2023", ["14", "230"]), ("2024", ["15", "231"]))
    )
    title = "<c:title><c:tx><c:rich><a:p><a:r><a:t>Kayaks sold</a:t></a:r></a:p></c:rich></c:tx></c:title>"
    parts = {"word/charts/chart1.xml": f"<c:chartSpace {ALL}><c:chart>{title}{series}</c:chart></c:chartSpace>"}
    uri = "http://schemas.openxmlformats.org/drawingml/2006/chart"
    body = p("before") + drawing("<c:chart r:id='k'/>", uri)
    upload = read(body, parts, {"k": "charts/chart1.xml"})
    assert upload.text == (
        "before\n\nKayaks sold\n\n|  | 2023 | 2024 |\n| --- | --- | --- |\n| North | 14 | 15 |\n| South | 230 | 231 |\n"
    )
    assert read(body).warnings == ["1 chart"]


def test_pictures_in_a_group_are_their_descriptions_or_told():
    group = "<wpg:wgp><pic:pic><pic:nvPicPr><pic:cNvPr id='1' name='x' descr='{}'/></pic:nvPicPr></pic:pic></wpg:wgp>"
    assert read(p("x") + drawing(group.format("A lighthouse"))).text == "x\n\nA lighthouse\n"
    assert read(p("x") + drawing(group.format(""))).warnings == ["1 picture without a description"]


def test_embedded_objects_and_comments_are_told():
    body = f"<w:p>{run('x')}<w:r><w:object><o:OLEObject ProgID='Excel.Sheet.12'/></w:object></w:r></w:p>"
    comments = f"<w:comments {ALL}>"
    comments += (
        f"<w:comment w:id='1'>{p('Check this')}</w:comment><w:comment w:id='2'>{p('And')}</w:comment></w:comments>"
    )
    upload = read(body, {"word/comments.xml": comments})
    assert (upload.text, upload.warnings) == ("x\n", ["1 embedded object (Excel.Sheet.12)", "2 comments"])


INNER = "The turbine bearing failed at 4,100 hours."
MAIL = f"MIME-Version: 1.0\r\nContent-Type: text/html; charset=utf-8\r\n\r\n<html><body><p>{INNER}</body></html>"


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("afchunk.html", f"<html><head><title>T</title></head><body><p>{INNER}</p></body></html>"),
        ("afchunk.mht", MAIL),
        ("afchunk.txt", INNER),
        ("afchunk.docx", word(p(INNER))),
    ],
)
def test_documents_within_a_document_are_read_in_their_place(part, content):
    body = p("Cover.") + "<w:altChunk r:id='x'/>" + p("Last.")
    upload = read(body, {f"word/{part}": content}, {"x": part})
    assert (upload.text, upload.warnings) == (f"Cover.\n\n{INNER}\n\nLast.\n", [])


def test_documents_within_a_document_that_cannot_be_read_are_told():
    body = "<w:altChunk r:id='x'/>"
    parts, links = {"word/chunk.rtf": "{\\rtf1 text}"}, {"x": "chunk.rtf"}
    told = r"a document within this one \(altChunk\) that is not read: chunk.rtf"
    assert len(read(p("Cover.") + body, parts, links).warnings) == 1
    with pytest.raises(Unsupported, match=f"there is no text in it, but there is: {told}"):
        read(body, parts, links)


def test_a_document_within_itself_ends():
    inner = word(p("deep") + "<w:altChunk r:id='x'/>", {"word/a.docx": word(p("deeper"))}, {"x": "a.docx"})
    for _ in range(6):
        inner = word(p("deep") + "<w:altChunk r:id='x'/>", {"word/a.docx": inner}, {"x": "a.docx"})
    upload = read_upload("a.docx", inner, max_bytes=10_000_000)
    assert upload.text.split() == ["deep"] * 4
    assert upload.warnings == ["a document within this one (altChunk) that is not read: a.docx"]


def test_links_keep_their_addresses():
    body = f"<w:p>{run('see ')}<w:hyperlink r:id='l'>{run('the plan')}</w:hyperlink></w:p>"
    links = '<Relationship Id="l" Type="x" Target="https://example.org/plan" TargetMode="External"/>'
    data = {"word/_rels/document.xml.rels": "<Relationships xmlns='http://schemas.openxmlformats.org/package/2006/"
            f"relationships'>{links}</Relationships>"}  # fmt: skip
    assert read(body, data).text == "see [the plan](https://example.org/plan)\n"


def test_deep_documents_made_to_harm_are_refused_or_read():
    body = "<w:p>" + "<w:odd>" * 3000 + run("x") + "</w:odd>" * 3000 + "</w:p>"
    assert read(body).text == "x\n"
