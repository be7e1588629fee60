"""An HTML page as its elements, read strictly: whatever is opened is closed."""

from __future__ import annotations

import re
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
        return "".join(one if isinstance(one, str) else one.text for one in self.content)

    def all(self, name: str | None = None) -> Iterator[Node]:
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
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.doctype == "doctype html"
    assert reader.open == [reader.root], f"{reader.open[-1].name} is not closed"
    return reader.root


def tables(root: Node) -> dict[str, list[list[str]]]:
    return {
        next(table.all("caption")).text: [
            [cell.text for cell in row.all() if cell.name in {"th", "td"}] for row in table.all("tr")
        ]
        for table in root.all("table")
    }


def assert_named(root: Node) -> None:
    ids = [node.attributes["id"] for node in root.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    references = [name for node in root.all() for name in node.attributes.get("aria-labelledby", "").split()]
    references += [node.attributes["href"].removeprefix("#") for node in root.all("a")]
    assert set(references) <= set(ids)
    assert len([*root.all("table")]) == len(tables(root)), "two tables have one caption"
    for table in root.all("table"):
        assert next(table.all("caption")).text
    for svg in root.all("svg"):
        assert svg.attributes["role"] == "img"
        assert next(svg.all("title")).text
        assert next(svg.all("desc")).text


def assert_self_contained(root: Node) -> str:
    assert not {"iframe", "object", "img", "form", "base", "embed"} & {node.name for node in root.all()}
    for node in root.all():
        assert not [name for name in node.attributes if name.startswith("on")]
        for name in {"src", "href", "action", "xlink:href"} & node.attributes.keys():
            assert re.match(r"#|data:", node.attributes[name])
        assert not re.search(r"https?:|url\(", node.attributes.get("style", ""))
    (style,) = root.all("style")
    assert not re.search(r"https?:|url\(|@import", style.text)
    (policy,) = (meta for meta in root.all("meta") if meta.attributes.get("http-equiv"))
    assert policy.attributes["content"].startswith("default-src 'none'; ")
    return policy.attributes["content"]
