"""An HTML page as its elements, read strictly: whatever is opened is closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}


@dataclass
class Node:
    """An element: its name, attributes, and what stands in it."""

    name: str
    attributes: dict[str, str]
    content: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it, without ends of lines."""
        return "".join(one if isinstance(one, str) else one.text for one in self.content)

    def all(self, name: str | None = None) -> Iterator[Node]:
        """Yield the elements in it, in order; of one name, if given."""
        for one in self.content:
            if isinstance(one, Node):
                if name in {None, one.name}:
                    yield one
                yield from one.all(name)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.open = [self.root]
        self.doctype: str | None = None

    def handle_decl(self, decl: str) -> None:
        self.doctype = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].content.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag, f"{tag} is closed, another one is open"

    def handle_data(self, data: str) -> None:
        self.open[-1].content.append(data)


def read(page: str) -> Node:
    """Return a page's root, and see to it that it is whole."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.doctype == "doctype html"
    assert reader.open == [reader.root], f"{reader.open[-1].name} is not closed"
    return reader.root


def tables(root: Node) -> dict[str, list[list[str]]]:
    """Return all tables by their captions: rows of cells, the headings first."""
    return {
        next(table.all("caption")).text: [
            [cell.text for cell in row.all() if cell.name in {"th", "td"}] for row in table.all("tr")
        ]
        for table in root.all("table")
    }
