"""Roman numerals from 1 to 3999."""

STEPS = [("M", 1000), ("CM", 900), ("D", 500), ("CD", 400), ("C", 100), ("XC", 90), ("L", 50), ("XL", 40), ("X", 10)]
STEPS += [("IX", 9), ("V", 5), ("IV", 4), ("I", 1)]


def to_roman(number):
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no Roman numeral")
    text = ""
    for letters, value in STEPS:
        while number >= value:
            text += letters
            number -= value
    return text


def from_roman(text):
    """Raises ValueError for whatever is not the one right way to write a number."""
    total, rest = 0, text
    for letters, value in STEPS:
        while rest.startswith(letters):
            total += value
            rest = rest[len(letters) :]
    if rest or not 1 <= total <= 3999 or to_roman(total) != text:
        raise ValueError(f"{text!r} is no Roman numeral")
    return total
