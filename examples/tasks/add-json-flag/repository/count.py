"""Counts lines, words and characters of files: `python3 count.py FILE...`"""

import argparse
from pathlib import Path


def counted(text):
    return {"lines": text.count("\n"), "words": len(text.split()), "characters": len(text)}


def row(counts, name):
    return f"{counts['lines']:7} {counts['words']:7} {counts['characters']:7} {name}"


def main():
    parser = argparse.ArgumentParser(description="Counts lines, words and characters.")
    parser.add_argument("files", nargs="+", help="files to count")
    options = parser.parse_args()
    counts = {name: counted(Path(name).read_text(encoding="utf-8")) for name in options.files}
    for name, each in counts.items():
        print(row(each, name))
    if len(counts) > 1:
        print(row({key: sum(each[key] for each in counts.values()) for key in ("lines", "words", "characters")}, "total"))


if __name__ == "__main__":
    main()
