"""`python3 try.py FILE`: runs the query in FILE over a few rows."""

import sqlite3
import sys
from pathlib import Path

ROWS = """
INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob');
INSERT INTO products VALUES (1, 'Pen', 150), (2, 'Ink', 900);
INSERT INTO orders VALUES (1, 1, '2025-03-01', 'paid'), (2, 2, '2025-03-02', 'open');
INSERT INTO items VALUES (1, 1, 2, 150), (2, 1, 1, 150);
"""

database = sqlite3.connect(":memory:")
database.executescript(Path("schema.sql").read_text() + ROWS)
for row in database.execute(Path(sys.argv[1]).read_text()):
    print(*row, sep=" | ")
