"""Roman numerals from 1 to 3999."""

VALUES = {"M": 1000, "D": 500, "C": 100, "L": 50, "X": 10, "V": 5, "I": 1}
STEPS = [("M", 1000), ("D", 500), ("C", 100), ("L", 50), ("X", 10), ("V", 5), ("I", 1)]


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
    total = 0
    for letter in text:
        if letter not in VALUES:
            raise ValueError(f"{text!r} is no Roman numeral")
        total += VALUES[letter]
    if not total:
        raise ValueError("an empty text is no Roman numeral")
    return total
