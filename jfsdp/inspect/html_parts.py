"""The parts of a page: bars drawn as inline SVG, tables of cells that are HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["svg", "swatch", "table"]


def swatch(color: str) -> str:
    """A small square in one of the style's colors."""
    return f'<span class="swatch {color}"></span>'


def svg(
    kind: str,
    parts: Sequence[tuple[float, str, str]],
    whole: float,
    label: str = "",
    mark: float | None = None,
) -> str:
    """A horizontal bar.

    Args:
        kind: its class in the style: "bar", "strip" or "inline".
        parts: side by side: size, color, and the text that shows on hovering.
        whole: what the full width stands for.
        label: what it shows, for readers who do not see it; "" where the text beside says so.
        mark: where to draw a line; None for none.
    """
    at, drawn = 0.0, []
    for size, color, text in parts:
        width = 1000 * size / max(whole, 1)
        title = f"<title>{escape(text)}</title>" if text else ""
        drawn.append(
            f'<rect class="{color}" x="{at:.2f}" width="{width:.2f}" height="10">{title}</rect>'
        )
        at += width
    if mark is not None:
        drawn.append(
            f'<rect class="mark" x="{1000 * mark / whole - 2:.2f}" width="4" height="10"/>'
        )
    said = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return (
        f'<svg class="{kind}" viewBox="0 0 1000 10" preserveAspectRatio="none" {said}>'
        f"{''.join(drawn)}</svg>"
    )


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int],
    fill: int = -1,
    wrap: int = -1,
    sums: Sequence[str] = (),
    kind: str = "",
) -> str:
    """A table.

    Args:
        head: the columns' names.
        rows: cells, of HTML.
        numbers: the columns to align to the right.
        fill: the column that takes the room that is left.
        wrap: the column whose text may be broken.
        sums: first cells of the rows to stress; rows whose second cell is "total" are too.
        kind: its class in the style: "narrow", "schedule" or "" for a wide one.
    """

    def cell(tag: str, at: int, text: str) -> str:
        of = {fill: "fill", wrap: "wrap"}.get(at, "number" if at in numbers else "")
        return f'<{tag} class="{of}">{text}</{tag}>' if of else f"<{tag}>{text}</{tag}>"

    def line(tag: str, cells: Sequence[str]) -> str:
        start = '<tr class="sum">' if cells[0] in sums or "total" in cells[1:2] else "<tr>"
        return start + "".join(cell(tag, at, text) for at, text in enumerate(cells)) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}">\n<thead>{line("th", head)}</thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
