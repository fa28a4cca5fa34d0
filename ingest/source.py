"""Source code: functions, classes and their members by tree-sitter's grammars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import tree_sitter_c
import tree_sitter_cpp
import tree_sitter_go
import tree_sitter_java
import tree_sitter_javascript
import tree_sitter_json
import tree_sitter_python
import tree_sitter_rust
import tree_sitter_typescript
from tree_sitter import Language, Node, Parser

from ingest.blocks import MAX_DEPTH, MAX_LEAD, Block, contiguous, shortened

_JSON = "text/x-json"
# Where the first grammar finds errors the next may do better: .h is C or C++, and TSX has other casts.
_GRAMMARS: dict[str, tuple[Callable[[], object], ...]] = {
    "text/x-c": (tree_sitter_c.language, tree_sitter_cpp.language),
    "text/x-cpp": (tree_sitter_cpp.language,),
    "text/x-go": (tree_sitter_go.language,),
    "text/x-java": (tree_sitter_java.language,),
    "text/x-javascript": (tree_sitter_javascript.language, tree_sitter_typescript.language_tsx),
    _JSON: (tree_sitter_json.language,),
    "text/x-python": (tree_sitter_python.language,),
    "text/x-rust": (tree_sitter_rust.language,),
    "text/x-typescript": (tree_sitter_typescript.language_typescript, tree_sitter_typescript.language_tsx),
}
MEDIA_TYPES = frozenset(_GRAMMARS)

# Characters. A larger file is generated, and parsing it would hold the interpreter for seconds; JSON is quicker.
_MAX_PARSED = 1_000_000
_MAX_PARSED_JSON = 5_000_000

# A node that starts inside a line is a unit of its own only where lines are longer: in minified code.
_MAX_LINE = 400
# Characters. Shorter than any passage: not looked into.
_MIN_CHILDREN = 16
# Characters. A definition on one line that is shorter is part of a run of short statements.
_MIN_STANDING = 64

_BODIES = frozenset((
    "array", "array_expression", "array_initializer", "block", "class_body", "compound_statement",
    "constructor_body", "declaration_list", "dictionary", "enum_body",
    "enum_variant_list", "enumerator_list", "field_declaration_list", "initializer_list", "interface_body",
    "interface_type", "list", "literal_value", "match_block", "object", "object_type", "set", "statement_block",
    "statement_list", "switch_block", "switch_body", "tuple",
))  # fmt: skip
# Not units themselves: what is in them lies beside what is around them. An include guard holds a whole header.
_CONTAINERS = frozenset((
    "ERROR", "enum_body_declarations", "internal_module", "linkage_specification", "mod_item", "module",
    "namespace_definition", "preproc_elif", "preproc_else", "preproc_if", "preproc_ifdef", "statement_list",
))  # fmt: skip
_COMMENTS = frozenset({"comment", "line_comment", "block_comment"})
_LEADING = _COMMENTS | {"attribute_item", "decorator", "access_specifier"}
_NAMED = frozenset((
    "abstract_class_declaration", "annotation_type_declaration", "class_declaration", "class_definition",
    "class_specifier", "constructor_declaration", "enum_declaration", "enum_item", "enum_specifier",
    "function_declaration", "function_definition", "function_item", "generator_function_declaration", "impl_item",
    "interface_declaration", "internal_module", "lexical_declaration", "macro_definition", "method_declaration",
    "method_definition", "mod_item", "module", "namespace_definition", "pair", "record_declaration",
    "struct_item", "struct_specifier", "trait_item", "type_alias_declaration", "type_declaration", "type_definition",
    "type_spec", "union_item", "union_specifier", "variable_declaration",
))  # fmt: skip
_FUNCTIONS = frozenset({"arrow_function", "class", "function_expression", "generator_function", "object"})

# What ends a unit on its line without being part of its node.
_TAIL = re.compile(r"[^\S\n]*[;,]?[^\S\n]*\n?")
_RECEIVER = re.compile(r"(\w+)(?:\[[^\]]*\])?\s*\)$")
_CONTINUATION = bytes(range(0x80, 0xC0))
_STEP = 256


@dataclass(slots=True)
class _Unit:
    """A node with the comments, attributes and decorators above it, in characters."""

    start: int
    # Where the node itself starts, or the last run of comments or of attributes so far.
    core: int
    end: int
    node: Node
    path: tuple[str, ...]
    # Comments and the like, which belong to what follows directly.
    leads: bool
    # A definition or a statement of several lines, which is no part of a run of short ones.
    stands: bool
    # Where each run of comments or of attributes above the node starts.
    leads_at: list[int] = field(default_factory=list)
    # The short statements that it is made of.
    run: list[_Unit] = field(default_factory=list)


def can_parse(text: str, media_type: str) -> bool:
    """Whether there is a grammar for `media_type`, and `text` is not too large to be parsed by it."""
    return media_type in MEDIA_TYPES and len(text) <= (_MAX_PARSED_JSON if media_type == _JSON else _MAX_PARSED)


def source(text: str, media_type: str) -> list[Block]:
    """The definitions and statements of a file as blocks, each with its members as children.

    A class or function is one block with its decorators, attributes and the comments directly above it; its
    docstring stays with its first line. Short statements that follow each other without a blank line are one
    block. The path is the names of the definitions around a block. Nodes with syntax errors are units too.
    """
    data = text.encode("utf-8", "surrogatepass")
    root = _parse(data, media_type)
    file = _File(text, data)
    # The members of a JSON document's one value are its units.
    is_value = media_type == _JSON and root.named_child_count == 1
    whole = root.named_children[0] if is_value else root
    units = _runs(file.units(file.nodes(whole, ()), 0))
    return contiguous(text, 0, len(text), [file.block(unit, 1) for unit in units], Block(0, 0, "code"))


def _parse(data: bytes, media_type: str) -> Node:
    roots = []
    for grammar in _GRAMMARS[media_type]:
        tree = Parser(_language(grammar)).parse(data)
        roots.append(tree.root_node)
        if not tree.root_node.has_error:
            return tree.root_node
    return roots[0]


@lru_cache
def _language(grammar: Callable[[], object]) -> Language:
    return Language(grammar())


class _File:
    def __init__(self, text: str, data: bytes) -> None:
        self.text = text
        self.data = data
        self.steps: list[int] = []
        if not text.isascii():
            # Characters before each 256th byte, since the parser counts bytes.
            characters = 0
            for start in range(0, len(data) + 1, _STEP):
                self.steps.append(characters)
                characters += len(data[start : start + _STEP].translate(None, _CONTINUATION))

    def at(self, byte: int) -> int:
        """The character that starts at `byte`."""
        if not self.steps:
            return byte
        step, rest = divmod(byte, _STEP)
        return self.steps[step] + len(self.data[byte - rest : byte].translate(None, _CONTINUATION))

    def nodes(self, parent: Node, path: tuple[str, ...], depth: int = 0) -> Iterator[tuple[Node, tuple[str, ...]]]:
        """What lies in a body, with the names around it; containers are opened."""
        for child in parent.named_children:
            inner = child.child_by_field_name("declaration") if child.type == "export_statement" else None
            container = inner or child
            if container.type in _CONTAINERS and depth < MAX_DEPTH:
                body = container.child_by_field_name("body") or container
                yield from self.nodes(body, path + self.name(container), depth + 1)
            else:
                yield child, path

    def units(self, nodes: Iterable[tuple[Node, tuple[str, ...]]], start: int) -> list[_Unit]:
        """`nodes` after `start` as units, comments and the like joined with what they belong to."""
        units: list[_Unit] = []
        for node, path in nodes:
            unit = self.unit(node, path)
            line = self.line_start(unit.start)
            last = units[-1] if units else None
            floor = last.end if last else start
            if unit.end <= floor:
                continue
            within = line is None or bool(self.text[line : unit.start].strip())
            if line is not None:
                unit.start = unit.core = max(line, floor)
            if last and line is not None and within and last.end > line:
                self.join(last, unit, apart=False)
            elif last and last.leads and last.path == unit.path and self.leads_to(last, unit):
                self.join(last, unit, apart=True)
            else:
                units.append(unit)
        return units

    def unit(self, node: Node, path: tuple[str, ...]) -> _Unit:
        start, end = self.at(node.start_byte), self.at(node.end_byte)
        tail = None if self.text[max(start, end - 1) : end] == "\n" else _TAIL.match(self.text, end)
        return _Unit(
            start=start,
            core=start,
            end=tail.end() if tail else end,
            node=node,
            path=path,
            leads=node.type in _LEADING,
            stands=node.type not in _COMMENTS
            and (
                self.text.find("\n", start, end - 1) >= 0
                or (node.type in _NAMED | _BODIES and end - start >= _MIN_STANDING)
            ),
        )

    def line_start(self, offset: int) -> int | None:
        """Where the line of `offset` starts; None for an endless line, as in minified code."""
        line = self.text.rfind("\n", max(0, offset - _MAX_LINE), offset) + 1
        limit = line + _MAX_LINE
        is_short = limit >= len(self.text) or self.text.find("\n", offset, limit) >= 0
        return line if is_short and offset <= limit else None

    def leads_to(self, lead: _Unit, unit: _Unit) -> bool:
        """Whether `unit` follows directly; a documentation comment may have a blank line below it."""
        between = self.text[lead.end : unit.start]
        if not between:
            return True
        is_documentation = self.text.startswith("/**", lead.core) and not self.text.startswith("/***", lead.core)
        return is_documentation and between.isspace() and between.count("\n") == 1

    def join(self, last: _Unit, unit: _Unit, apart: bool) -> None:
        last.end = unit.end
        if last.leads:
            if apart and (not unit.leads or (last.node.type in _COMMENTS) != (unit.node.type in _COMMENTS)):
                if len(last.leads_at) < MAX_DEPTH:
                    last.leads_at.append(last.core)
                last.core = unit.core
            last.node, last.leads, last.stands = unit.node, unit.leads, unit.stands
            if unit.node.type in _COMMENTS and not apart:
                last.leads = True

    def block(self, unit: _Unit, depth: int) -> Block:
        if unit.run:
            children = tuple(self.block(part, depth + 1) for part in unit.run)
            return Block(unit.start, unit.end, "code", unit.path, children=children)
        path = unit.path + self.name(unit.node)
        lead = self.signature(unit.node, path) if len(path) > len(unit.path) else ()
        block = Block(unit.core, unit.end, "code", path, children=self.children(unit, path, depth), lead=lead)
        # What does not fit with all that is above it keeps as much of that as fits.
        for start in reversed(unit.leads_at):
            block = Block(start, unit.end, "code", path, children=(block,), lead=lead)
        return block

    def signature(self, node: Node, path: tuple[str, ...]) -> tuple[str, ...]:
        """The path of the later parts of a definition: what is before its body, in the place of its name."""
        for wrapper in ("declaration", "definition"):
            node = node.child_by_field_name(wrapper) or node
        bodies = _bodies(node)
        if not bodies or node.type == "pair":
            return ()
        text = self.text[self.at(node.start_byte) : self.at(bodies[0].start_byte)]
        return (*path[:-1], shortened(text.rstrip(" \t\n{:="), MAX_LEAD // 2))

    def children(self, unit: _Unit, path: tuple[str, ...], depth: int) -> tuple[Block, ...]:
        if depth >= MAX_DEPTH or unit.end - unit.core < _MIN_CHILDREN:
            return ()
        nodes = (pair for body in _bodies(unit.node) for pair in self.nodes_after_docstring(body, path))
        return tuple(self.block(inner, depth + 1) for inner in self.units(nodes, unit.core))

    def nodes_after_docstring(self, body: Node, path: tuple[str, ...]) -> Iterator[tuple[Node, tuple[str, ...]]]:
        for index, (node, path_) in enumerate(self.nodes(body, path)):
            is_first = index == 0 and body.type == "block" and node.type == "expression_statement"
            if not is_first or node.named_children[0].type != "string":
                yield node, path_

    def name(self, node: Node) -> tuple[str, ...]:
        """The name that `node` gives what is in it, if any."""
        for wrapper in ("declaration", "definition"):
            node = node.child_by_field_name(wrapper) or node
        if node.type == "template_declaration" and node.named_children:
            node = node.named_children[-1]
        if node.type == "expression_statement":
            name = self.assigned(node)
        elif node.type not in _NAMED:
            return ()
        elif node.type == "impl_item":
            parts = [self.content(node.child_by_field_name(part)) for part in ("trait", "type")]
            name = " for ".join(part for part in parts if part)
        elif node.type in ("lexical_declaration", "variable_declaration"):
            declarator = node.named_children[0]
            value = declarator.child_by_field_name("value")
            is_function = value is not None and value.type in _FUNCTIONS
            name = self.content(declarator.child_by_field_name("name")) if is_function else ""
        elif node.type == "type_declaration":
            name = self.content(node.named_children[0].child_by_field_name("name"))
        else:
            name = self.content(_name_node(node)).strip("\"'")
            receiver = _RECEIVER.search(self.content(node.child_by_field_name("receiver")))
            name = f"{receiver[1]}.{name}" if receiver else name
        return (shortened(name),) if name.strip() else ()

    def assigned(self, statement: Node) -> str:
        """What a function or class is assigned to, such as `exports.parse`."""
        assignment = statement.named_children[0] if statement.named_children else None
        value = assignment.child_by_field_name("right") if assignment else None
        is_function = value is not None and value.type in _FUNCTIONS
        return self.content(assignment.child_by_field_name("left")) if assignment and is_function else ""

    def content(self, node: Node | None) -> str:
        return "" if node is None else self.text[self.at(node.start_byte) : self.at(node.end_byte)]


def _runs(units: Iterable[_Unit]) -> Iterator[_Unit]:
    run: list[_Unit] = []
    for unit in units:
        if run and (unit.stands or run[-1].end != unit.start or run[-1].path != unit.path):
            yield _run(run)
            run = []
        if unit.stands:
            yield unit
        else:
            run.append(unit)
    if run:
        yield _run(run)


def _run(units: list[_Unit]) -> _Unit:
    first = units[0]
    if len(units) == 1:
        return first
    return replace(first, end=units[-1].end, run=units)


def _bodies(node: Node) -> list[Node]:
    """The outermost bodies in `node`, in order: those of an `if` and of its `else`, say."""
    bodies: list[Node] = []
    waiting = [node]
    while waiting:
        next_ = waiting.pop()
        if next_.type in _BODIES:
            bodies.append(next_)
        elif next_.end_point.row > next_.start_point.row or next_.end_byte - next_.start_byte > _MAX_LINE:
            waiting += reversed(next_.named_children)
    return bodies


def _name_node(node: Node) -> Node | None:
    name = node.child_by_field_name("name") or node.child_by_field_name("key")
    # C wraps the name of a function in its pointers and parameters.
    declarator = node.child_by_field_name("declarator") if name is None else None
    while declarator is not None:
        name = declarator
        declarator = declarator.child_by_field_name("declarator")
    return name
