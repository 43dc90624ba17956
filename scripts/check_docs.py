"""Fail if README or ARCHITECTURE are too long, or a link in the docs leads nowhere.

Addresses on the web are not visited. An anchor must be a heading of the linked page, as GitHub names it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"README.md": (80, 900), "ARCHITECTURE.md": (1000, 1000)}  # lines, words
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """Return all Markdown files of the project."""
    folders = [ROOT / name for name in ("docs", "demos", "models", "tests")]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def problems() -> Iterator[str]:
    """Yield a sentence for each problem."""
    for name, (most_lines, most_words) in LIMITS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for count, most, unit in ((text.count("\n"), most_lines, "lines"), (len(text.split()), most_words, "words")):
            if count > most:
                yield f"{name}: {count} {unit}, at most {most}"
    for page in pages():
        for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            address, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / address).resolve() if address else page
            if not target.exists():
                yield f"{page.relative_to(ROOT)}: {link} is not there"
            elif anchor and anchor not in anchors(target):
                yield f"{page.relative_to(ROOT)}: {link}: there is no such heading"


def main() -> None:
    sys.exit("\n".join(problems()) or 0)


if __name__ == "__main__":
    main()
