"""Cells of Markdown tables."""


def escape_cell(text: str) -> str:
    """The text on one line, with its bars escaped, so that none ends the cell."""
    return " ".join(text.split()).replace("|", "\\|")
