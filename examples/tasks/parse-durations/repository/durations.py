"""Durations as people write them."""


def parse(text):
    """The seconds of `text`, as README.md says."""
    raise ValueError("nothing can be parsed yet")
