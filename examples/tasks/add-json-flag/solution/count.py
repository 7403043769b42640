"""Counts lines, words and characters of files: `python3 count.py [--json] FILE...`"""

import argparse
import json
import sys
from pathlib import Path


def counted(text):
    return {"lines": text.count("\n"), "words": len(text.split()), "characters": len(text)}


def row(counts, name):
    return f"{counts['lines']:7} {counts['words']:7} {counts['characters']:7} {name}"


def read(name):
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"count: {name}: {error}", file=sys.stderr)
        sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description="Counts lines, words and characters.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("files", nargs="+", help="files to count")
    options = parser.parse_args()
    counts = {name: counted(read(name)) for name in options.files}
    if options.json:
        print(json.dumps(counts))
        return
    for name, each in counts.items():
        print(row(each, name))
    if len(counts) > 1:
        print(row({key: sum(each[key] for each in counts.values()) for key in ("lines", "words", "characters")}, "total"))


if __name__ == "__main__":
    main()
