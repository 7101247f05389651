"""One self-contained HTML page: text, tables and pictures in sections, without any script.

Markup is `Html`; whatever else goes into an element is text and is escaped, so a channel called
`<b>` is four characters on the page. Nothing is fetched: styles stand in the page, curves as SVG
among the elements, maps as data: URIs.
"""

import base64
import html
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graticule
from graticule.report.picture import Picture
from graticule.report.style import STYLE

MARK = '<meta name="generator" content="graticule report'
MOST_ROWS = 40
"""Rows of the numbers behind a picture; more of them are thinned evenly."""

MOST_ON_A_SHEET = 25
"""Lines of a table or block that printing does not cut."""


class Html(str):
    """Text that is markup already."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """<name attributes>children</name>; text is escaped, `Html` is not, None is left out.

    An underscore in an attribute's name is a hyphen, one at its end is dropped (`class_`).
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in ("meta", "img", "br"):
        return Html(f"<{name}{told}>")
    return Html(f"<{name}{told}>{inside(*children)}</{name}>")


def inside(*children: Any) -> Html:
    return Html(
        "".join(
            child if isinstance(child, Html) else html.escape(str(child), quote=False)
            for child in children
            if child is not None
        )
    )


def paragraph(*children: Any) -> Html:
    return tag("p", *children)


def items(children: Sequence[Any]) -> Html:
    return tag("ul", *(tag("li", child) for child in children))


def link(anchor: str, text: str) -> Html:
    """To a section of the same page."""
    return tag("a", text, href=f"#{anchor}")


def beside(figures: Sequence[Html]) -> Html:
    """Figures side by side where there is room."""
    return tag("div", *figures, class_="beside")


def note(*children: Any) -> Html:
    """What is missing here and how to get it."""
    return tag("p", *children, class_="note")


def details(summary: str, *children: Any) -> Html:
    return tag("details", tag("summary", summary), *children)


def block(text: str, label: str) -> Html:
    """Commands or a configuration, line by line; scrolls inside its own box."""
    return tag(
        "pre",
        tag("code", text),
        tabindex="0",
        role="region",
        aria_label=label,
        class_="scroll whole" if text.count("\n") < MOST_ON_A_SHEET else "scroll",
    )


def number(value: Any) -> str:
    """Four digits that matter; an en dash where there is no number."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        # Zeros at the end stay: digits of a column stand below one another.
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:#.4g}".rstrip(".")
    return str(value)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
    """Columns of numbers are aligned to the right; the first column names its row."""
    numeric = [
        all(row[i] is None or isinstance(row[i], int | float) for row in rows) and bool(rows)
        for i in range(len(columns))
    ]

    def cells(row: Sequence[Any]) -> list[Html]:
        found = []
        for i, value in enumerate(row):
            shown = value if isinstance(value, Html) else number(value)
            style = "number" if numeric[i] else "short" if len(shown) <= 12 else None
            scope = "row" if i == 0 else None
            found.append(tag("td" if i else "th", shown, scope=scope, class_=style))
        return found

    head = [
        tag("th", name, scope="col", class_="number" if numeric[i] else None)
        for i, name in enumerate(columns)
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", tag("span", caption)),
            tag("thead", tag("tr", *head)),
            tag("tbody", *(tag("tr", *cells(row)) for row in rows)),
        ),
        # A box that scrolls must be reachable by the keyboard; a short table stays on one sheet.
        class_="scroll whole" if len(rows) < MOST_ON_A_SHEET else "scroll",
        tabindex="0", role="region", aria_label=caption,
    )  # fmt: skip


def figure(picture: Picture) -> Html:
    """The picture under its title, what is drawn below it, and its numbers to unfold."""
    drawn = _svg(picture) if picture.svg else _image(picture)
    return tag(
        "figure",
        tag("h3", picture.title),
        tag(
            "div", drawn, class_="scroll picture", tabindex="0", role="region",
            aria_label=f"Picture: {picture.title}",
        ),
        tag("figcaption", picture.caption),
        _numbers(picture),
        id=f"picture-{picture.name}",
    )  # fmt: skip


def _image(picture: Picture) -> Html:
    width, height = struct.unpack(">II", picture.png[16:24])  # of the PNG's first chunk
    encoded = base64.b64encode(picture.png).decode()
    return tag(
        "img", src=f"data:image/png;base64,{encoded}", alt=picture.alt, width=width, height=height
    )


def _svg(picture: Picture) -> Html:
    """The <svg> element alone, with a name and a description for those who do not see it."""
    body = picture.svg[picture.svg.index("<svg") :]
    # Who drew it, in RDF with addresses: of no use inside a page.
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    end = body.index(">")
    opening = re.sub(r'\s(role|aria-label|aria-labelledby)="[^"]*"', "", body[4:end])
    title, description = f"{picture.name}-title", f"{picture.name}-description"
    told = tag("title", picture.title, id=title) + tag("desc", picture.alt, id=description)
    return Html(
        f'<svg role="img" aria-labelledby="{title} {description}"{opening}>{told}{body[end + 1 :]}'
    )


def _numbers(picture: Picture) -> Html | None:
    rows = picture.table
    if not rows:
        return None
    columns = list(dict.fromkeys(key for row in rows for key in row))
    caption = f"Numbers of: {picture.title}"
    if len(rows) > MOST_ROWS:
        last = len(rows) - 1
        picked = sorted({round(i * last / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})
        caption += f" ({len(picked)} of {len(rows):,} rows, evenly taken)"
        rows = [rows[i] for i in picked]
    shown = table(
        caption,
        [column.replace("_", " ") for column in columns],
        [[row.get(column) for column in columns] for row in rows],
    )
    return details("The numbers behind this picture", shown)


@dataclass(frozen=True, kw_only=True)
class Section:
    """anchor: what links lead to; unique on the page."""

    anchor: str
    title: str
    body: Sequence[Html]


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The whole document. Sections are numbered, so that a printed link still leads somewhere."""
    contents = [tag("li", link(section.anchor, section.title)) for section in sections]
    main = [
        tag(
            "section",
            tag("h2", f"{i}. {section.title}", id=f"{section.anchor}-heading"),
            *section.body,
            id=section.anchor,
            aria_labelledby=f"{section.anchor}-heading",
        )
        for i, section in enumerate(sections, start=1)
    ]
    head = inside(
        tag("meta", charset="utf-8"),
        Html(f'{MARK} {graticule.__version__}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    body = inside(
        tag("a", "Skip to the summary", href="#main", class_="skip"),
        tag("header", tag("h1", title), tag("p", subtitle, class_="subtitle")),
        tag("nav", tag("ol", *contents), aria_label="Contents"),
        tag("main", *main, id="main"),
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


def require_writable(path: Path) -> None:
    """ValueError unless `path` can hold a page: it is free, or an earlier report of ours."""
    if path.is_symlink() or path.exists():
        earlier = path.is_file() and MARK in path.read_text(errors="replace")[:300]
        if not earlier:
            raise ValueError(
                f"{path} is no report of ours, so it is not replaced; name another with --out"
            )
    if not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"{path.parent} permission denied, or no such folder; name another with --out"
        )


def write_page(path: Path, text: str) -> None:
    """A reader sees the former page or this one, never half of it."""
    require_writable(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}; make room or access") from error
    finally:
        part.unlink(missing_ok=True)
