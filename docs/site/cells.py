"""What tables of Markdown ask of their cells."""


def in_a_cell(text: str) -> str:
    """The text on one line, with no bar that would end its cell."""
    return " ".join(text.split()).replace("|", "\\|")
