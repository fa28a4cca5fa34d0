"""What the parts of an Office file have in common: their zip archive, their XML, and how one names another."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree as ET

RELATIONSHIPS = (
    "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}",
    "{http://purl.oclc.org/ooxml/officeDocument/relationships}",
)


class Package:
    """The parts of an Office file, read when asked for. Raises zipfile.BadZipFile and the like for damaged files."""

    def __init__(self, data: bytes) -> None:
        self._archive = zipfile.ZipFile(io.BytesIO(data))
        self.names = self._archive.namelist()

    @property
    def main(self) -> str | None:
        """The part that the file is about, such as word/document.xml; None where none is named."""
        links = self.xml("_rels/.rels")
        for link in links if links is not None else ():
            if link.get("Type", "").endswith("/officeDocument"):
                return link.get("Target", "").lstrip("/")
        return None

    def read(self, name: str) -> bytes:
        """The bytes of a part."""
        return self._archive.read(name)

    def xml(self, name: str) -> ET.Element | None:
        """The root of a part; None where it is not there."""
        return ET.fromstring(self.read(name)) if name in self.names else None

    def targets(self, name: str) -> dict[str, str]:
        """The parts that a part names, by the id that it gives them."""
        folder, file = posixpath.split(name)
        links = self.xml(f"{folder}/_rels/{file}.rels")
        if links is None:
            return {}
        return {
            link.get("Id", ""): posixpath.normpath(posixpath.join("/", folder, link.get("Target", ""))).lstrip("/")
            for link in links
            if link.get("TargetMode") != "External"
        }

    def copy(self, changed: dict[str, ET.Element]) -> bytes:
        """The file with some parts changed."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as copy:
            for name in dict.fromkeys(self.names):
                root = changed.get(name)
                copy.writestr(name, self.read(name) if root is None else ET.tostring(root))
        return file.getvalue()


def kind(node: ET.Element) -> str:
    """The tag without its namespace."""
    return node.tag.rpartition("}")[2]


def space(node: ET.Element) -> str:
    """The namespace of the tag, in braces."""
    return node.tag.rpartition("}")[0] + "}"


def value(node: ET.Element, name: str = "val") -> str | None:
    """The attribute `name`, whatever namespace it has."""
    return next((text for key, text in node.items() if key.rpartition("}")[2] == name), None)


def child(node: ET.Element | None, *names: str) -> ET.Element | None:
    """The first child called as `names` say, one below the other."""
    for name in names:
        node = next((inner for inner in node if kind(inner) == name), None) if node is not None else None
    return node


def within(node: ET.Element, name: str) -> Iterator[ET.Element]:
    """Every element called `name` in `node`, in order."""
    return (inner for inner in node.iter() if kind(inner) == name)


def text_of(node: ET.Element, name: str = "t") -> str:
    """What the elements called `name` in `node` say, one behind the other."""
    return "".join(inner.text or "" for inner in within(node, name))
