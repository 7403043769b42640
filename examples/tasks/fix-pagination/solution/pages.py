"""Lists, one page at a time."""


def page_count(items, size):
    if size < 1:
        raise ValueError(f"a page of {size} items cannot be")
    return -(-len(items) // size)


def pages(items, size):
    """The items in their order, `size` on each page; the last page has what is left."""
    return [items[number * size : (number + 1) * size] for number in range(page_count(items, size))]
