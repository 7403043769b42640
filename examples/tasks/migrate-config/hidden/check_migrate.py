import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PROGRAM = Path("migrate.py").resolve()


class Migrate(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def migrate(self, **files):
        for name, content in files.items():
            (self.folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        command = [sys.executable, str(PROGRAM), *files]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)

    def text(self, name):
        return (self.folder / name).read_text()

    def test_everything(self):
        old = {"version": 1, "server": "example.org:8080", "timeout": 2500, "debug": True, "plugins": "a, b,c", "more": [1]}
        self.assertEqual(self.migrate(a=old).returncode, 0)
        server = {"host": "example.org", "port": 8080}
        new = {"version": 2, "server": server, "timeout_seconds": 2.5, "log_level": "debug", "plugins": ["a", "b", "c"]}
        self.assertEqual(self.text("a"), json.dumps({**new, "extra": {"more": [1]}}, indent=2) + "\n")

    def test_the_least(self):
        self.migrate(a={"version": 1, "server": "h"}, b={"version": 1, "server": "h", "debug": False, "plugins": ""})
        new = {"version": 2, "server": {"host": "h", "port": 80}, "log_level": "info", "plugins": []}
        self.assertEqual(json.loads(self.text("a")), new)
        self.assertEqual(json.loads(self.text("b")), new)

    def test_ipv6(self):
        self.migrate(a={"version": 1, "server": "[::1]:81"}, b={"version": 1, "server": "[fe80::2]"})
        self.assertEqual(json.loads(self.text("a"))["server"], {"host": "::1", "port": 81})
        self.assertEqual(json.loads(self.text("b"))["server"], {"host": "fe80::2", "port": 80})

    def test_version_2_is_not_touched(self):
        text = '{"version": 2,   "odd": "spaces"}'
        done = self.migrate(a=text, b={"version": 1, "server": "h"})
        self.assertEqual((done.returncode, self.text("a")), (0, text))
        self.assertEqual(json.loads(self.text("b"))["version"], 2)

    def test_what_is_no_configuration(self):
        bad = {"a": "no json", "b": "[1]", "c": '{"version": 3}', "d": '{"version": 1}'}
        done = self.migrate(**bad, e={"version": 1, "server": "h"})
        self.assertEqual(done.returncode, 1)
        for name, text in bad.items():
            self.assertEqual(self.text(name), text)
            self.assertIn(name, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        self.assertEqual(json.loads(self.text("e"))["version"], 2)
