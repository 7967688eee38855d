"""What a person sees: aligned text where it is piped, color and a clock in a terminal if rich is there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jfsdp.inspect.table import aligned

__all__ = ["Screen", "Table", "screen"]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; `str()` is its plain form.

    Attributes:
        title: its first line.
        head: the columns' names.
        rows: the cells.
        total: a last line below a rule; empty for none.
        left: how many columns are aligned to the left, the others to the right.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    total: tuple[str, ...] = ()
    left: int = 1

    def __str__(self) -> str:
        cells = [self.head, *self.rows, *([self.total] if self.total else [])]
        lines = aligned(cells, self.left)
        rule = "-" * max(map(len, lines))
        last = len(lines) - bool(self.total)
        below = [rule, *lines[last:]] if self.total else []
        return "\n".join([self.title, "", lines[0], rule, *lines[1:last], *below])


class Screen:
    """Plain output."""

    def show(self, *blocks: str | Table) -> None:
        """Print texts and tables, a blank line after each table."""
        for block in blocks:
            print(block)
            if isinstance(block, Table):
                print()

    def verdict(self, text: str, good: bool | None) -> None:
        """Print the line that counts; `good` is None where there is nothing to judge."""
        print(text)

    def working(self, text: str) -> contextlib.AbstractContextManager[Any]:
        """While the block runs, say what takes so long; where nobody looks on, on stderr."""
        print(f"{text} ...", file=sys.stderr)
        return contextlib.nullcontext()


class RichScreen(Screen):
    """Output to a terminal, by rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False)

    def show(self, *blocks: str | Table) -> None:
        for block in blocks:
            if isinstance(block, Table):
                self.console.print(_rich_table(block))
            else:
                self.console.print(block, markup=False, soft_wrap=True)

    def verdict(self, text: str, good: bool | None) -> None:
        style = {True: "bold green", False: "bold red", None: "bold"}[good]
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        from rich.markup import escape
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(escape(text), total=None)
            yield


def screen() -> Screen:
    """The screen for this process's stdout."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return RichScreen()
    return Screen()


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=bool(table.total),
        footer_style="bold",
        pad_edge=False,
    )
    footers = table.total or ("",) * len(table.head)
    for at, (name, footer) in enumerate(zip(table.head, footers, strict=True)):
        side = "left" if at < table.left else "right"
        made.add_column(Text(name), Text(footer), justify=side, overflow="fold")
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made
