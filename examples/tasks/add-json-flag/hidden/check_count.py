import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROGRAM = Path("count.py").resolve()


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "a.txt").write_text("one two\nthree\n")
        (self.folder / "b.txt").write_text("é", encoding="utf-8")

    def count(self, *arguments):
        command = [sys.executable, str(PROGRAM), *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, encoding="utf-8")


class Json(Files):
    def test_one_file(self):
        done = self.count("--json", "a.txt")
        self.assertEqual(json.loads(done.stdout), {"a.txt": {"lines": 2, "words": 3, "characters": 14}})

    def test_two_files(self):
        done = self.count("--json", "a.txt", "b.txt")
        self.assertEqual(json.loads(done.stdout)["b.txt"], {"lines": 0, "words": 1, "characters": 1})
        self.assertEqual(sorted(json.loads(done.stdout)), ["a.txt", "b.txt"])

    def test_help(self):
        self.assertIn("--json", self.count("--help").stdout)


class Plain(Files):
    def test_table(self):
        self.assertEqual(self.count("a.txt").stdout, "      2       3      14 a.txt\n")

    def test_total(self):
        self.assertEqual(self.count("a.txt", "b.txt").stdout.splitlines()[-1], "      2       4      15 total")


class Missing(Files):
    def test_named(self):
        for arguments in (["gone.txt"], ["--json", "a.txt", "gone.txt"]):
            done = self.count(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn("gone.txt", done.stderr)
            self.assertNotIn("Traceback", done.stderr)
            self.assertEqual(done.stdout, "")
