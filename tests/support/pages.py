"""A page as tests read it, and what must be true of every page."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser


class Reader(HTMLParser):
    """Elements with their attributes, texts, and whether every element was closed."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "br", "wbr", "hr", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_page(content: str) -> Reader:
    """What must be true of every page."""
    reader = Reader(content)
    assert not reader.open
    # Everybody can read it.
    for tag, attributes in reader.elements:
        if tag in ("svg", "img"):
            described = attributes.get("alt") or attributes.get("aria-label")
            assert described and attributes.get("role", "img") == "img", attributes
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
    assert reader.all("html")[0]["lang"] == "en"
    assert len(reader.all("h1")) == len(reader.all("main")) == len(reader.all("title")) == 1
    assert len(reader.all("table")) == len(reader.all("caption"))
    figures = [tag for tag, _ in reader.elements if tag in ("figure", "figcaption")]
    assert figures == ["figure", "figcaption"] * (len(figures) // 2)
    # It needs nothing else: no script, nothing from the network.
    tags = {tag for tag, _ in reader.elements}
    assert not tags & {"script", "iframe", "object", "embed", "form", "base", "audio", "video"}
    for tag, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            address = attributes.get(name, "#")
            known = r"https://arxiv\.org/abs/[\d.]+|statement\.html|report\.html"
            link = tag == "a" and re.fullmatch(known, address)
            assert link or address.startswith(("#", "data:")), (tag, address)
    assert not re.search(r"@import|url\((?!#)", content)
    outside = set(re.findall(r"https?://[^\s\"'<>]*", content))
    assert all(address.startswith("https://arxiv.org/abs/") for address in outside), outside
    policies = [m["content"] for m in reader.all("meta") if "http-equiv" in m]
    assert policies and "default-src 'none'" in policies[0] and "script" not in policies[0]
    # Its links lead somewhere, and its names are its own.
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    local = {a["href"][1:] for _, a in reader.elements if a.get("href", "").startswith("#")}
    local |= set(re.findall(r"url\(#([^)]*)\)", content))
    assert local <= set(ids)
    # matplotlib's numbers are all there: a NaN would be a hole in a line.
    assert not re.search(r'd="[^"]*nan', content)
    return reader


def order(content: str, *names: str) -> None:
    """The sections come in this order."""
    places = [content.index(f'<section id="{name}"') for name in names]
    assert places == sorted(places)


def downloads(reader: Reader) -> dict[str, bytes]:
    found = {}
    for link in reader.all("a"):
        if "download" in link:
            found[link["download"]] = base64.b64decode(link["href"].partition("base64,")[2])
    return found
