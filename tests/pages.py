"""A page as its reader has it."""

from __future__ import annotations

import html.parser
from pathlib import Path


class Page(html.parser.HTMLParser):
    """Tags, ids, links and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[k] for k in ("href", "xlink:href", "src") if k in values]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.words).split())

    def dead_links(self, folder: Path) -> list[str]:
        """The links that lead nowhere, from a page in a folder."""
        inside = {f"#{each}" for each in self.ids}
        return [x for x in self.links if x not in inside and not (folder / x).is_file()]
