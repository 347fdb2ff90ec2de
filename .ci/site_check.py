"""Check that the pages of a built site load nothing from other hosts.

    python .ci/site_check.py site

Reads what a browser loads by itself: elements of pages, style sheets, and addresses in scripts.  Links that a reader
follows may lead anywhere.  Exit status 1 with a line for each fault.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

LOADED = {  # element -> attributes that are loaded
    "audio": ("src",), "embed": ("src",), "iframe": ("src",), "image": ("href", "xlink:href"), "img": ("src", "srcset"),
    "input": ("src",), "link": ("href",), "object": ("data",), "script": ("src",), "source": ("src", "srcset"),
    "track": ("src",), "use": ("href", "xlink:href"), "video": ("src", "poster"),
}  # fmt: skip
NOT_LOADED = {"alternate", "author", "canonical", "license", "next", "prev"}  # values of rel of <link>
FOREIGN = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?//", re.I)
IN_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:[a-z][a-z0-9+.-]*:)?//[^"')\s]+)""", re.I)
IN_SCRIPT = re.compile(r"""\bhttps?://[^\s"'`<>\\)]+""")
COMMENT = re.compile(r"/\*.*?\*/", re.S)
# addresses in the theme's scripts -> what a page has that loads them; "" for those that nothing loads
KNOWN = {
    "http://www.w3.org/": "",  # names of XML namespaces
    "https://bit.ly/": "",  # in the text of an error
    "https://api.github.com/": 'data-md-component="source"',
    "https://${e}/api/": 'data-md-component="source"',
    "https://unpkg.com/mermaid": 'class="mermaid"',
    "https://unpkg.com/resize-observer-polyfill": "",  # only browsers before 2020, which have no ResizeObserver
}
LANGUAGES = "assets/javascripts/lunr/"  # loaded for search in other languages than English


class Page(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.inside = tag
        self.loads += IN_STYLE.findall(given.get("style", ""))
        if tag == "link" and set(given.get("rel", "").lower().split()) <= NOT_LOADED:
            return
        for name in LOADED.get(tag, ()):
            value = given.get(name, "")
            several = re.split(r",\s+", value) if name == "srcset" else [value]
            self.loads += (one for one in several if FOREIGN.match(one))

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.loads += IN_STYLE.findall(data)
        elif self.inside == "script":
            self.loads += IN_SCRIPT.findall(data)


def of_page(text: str) -> list[str]:
    """Return the addresses on other hosts that a page loads."""
    page = Page()
    page.feed(text)
    return page.loads


def of_script(text: str, pages: str) -> Iterator[str]:
    """Yield the addresses in a script, but for known ones that nothing in the text of all ``pages`` loads."""
    for address in sorted(set(IN_SCRIPT.findall(COMMENT.sub("", text)))):
        causes = [cause for known, cause in KNOWN.items() if address.startswith(known)]
        if not causes or any(cause and cause in pages for cause in causes):
            yield address


def faults(site: Path) -> Iterator[str]:
    """Yield a line for each address on another host that the files of a site load."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    if not texts:
        yield "there are no pages"
    found = [(path, address) for path, text in texts.items() for address in of_page(text)]
    for path in sorted(site.rglob("*.css")):
        found += ((path, address) for address in IN_STYLE.findall(path.read_text(encoding="utf-8")))
    scripts = (path for path in sorted(site.rglob("*.js")) if LANGUAGES not in path.as_posix())
    for path in scripts:
        found += ((path, address) for address in of_script(path.read_text(encoding="utf-8"), "".join(texts.values())))
    for path, address in found:
        yield f"{path.relative_to(site)} loads {address.strip()}"


def main() -> None:
    site = Path(sys.argv[1])
    if found := list(faults(site)):
        sys.exit("\n".join(found))
    print(f"{len(list(site.rglob('*.html')))} pages load nothing from other hosts")


if __name__ == "__main__":
    main()
