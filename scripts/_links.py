"""Follow every link inside a built site, and find everything that it would load from elsewhere.

    python scripts/_links.py build/docs

A link to another site is not checked, because it cannot be followed without a network. A picture, script, style or
frame from elsewhere is an error, because the site must be readable without a network.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "object": "data"}
"""Elements that load something with the page -> the attribute with its address."""


class Link(NamedTuple):
    """A target to which a page points, and whether it is loaded with the page."""

    target: str
    loaded: bool


class Page(HTMLParser):
    """The links of a page, and the places in it that a link can point to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[Link] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the targets of an element and its name."""
        given = {name: value for name, value in attrs if value is not None}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(Link(given["href"], loaded=False))
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.links.append(Link(given.get("href", ""), loaded=True))
        elif tag in LOADED and LOADED[tag] in given:
            self.links.append(Link(given[LOADED[tag]], loaded=True))


def problems(site: Path) -> list[str]:
    """A line for each link of the site's pages that leads nowhere, and for each thing loaded from elsewhere."""
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links:
            if why := _wrong(link, path, pages, site):
                found.append(f"{path.relative_to(site)}: {link.target}: {why}")
    return found


def _wrong(link: Link, path: Path, pages: dict[Path, Page], site: Path) -> str | None:
    parts = urlsplit(link.target)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return "loaded from elsewhere" if link.loaded else None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_relative_to(site):
        return "leads out of the site"
    if not target.is_file():
        return "no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
        return "no such place in that page"
    return None


def main() -> int:
    """Print all problems. Returns 1 if there are any, or if there is no page, else 0."""
    site = Path(sys.argv[1])
    if not (site / "index.html").is_file():
        print(f"{site}: no index.html there: not a built site", file=sys.stderr)
        return 1
    found = problems(site)
    print("\n".join(found) if found else f"{site}: every link inside it leads somewhere", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
