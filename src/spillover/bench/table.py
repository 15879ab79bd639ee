"""The table layout that all commands use."""

from __future__ import annotations

from collections.abc import Collection

from rich.table import Table


def make_table(title: str, *headings: str, text: Collection[str] = (), caption: str | None = None) -> Table:
    """Make a table whose columns are numeric, except for the first one and those named in `text`."""
    table = Table(title=title, title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    for place, heading in enumerate(headings):
        is_text = place == 0 or heading in text
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold" if is_text else "ellipsis")
    return table
