"""Prints which part of the cases the script in the current directory gets right."""

import stat
import subprocess
import tempfile
from pathlib import Path

SCRIPT = Path("rotate.sh").resolve()


def run(folder, *arguments):
    try:
        return subprocess.run([str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True)
    except OSError as error:
        return subprocess.CompletedProcess(arguments, 126, "", str(error))


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def first(folder):
    (folder / "a.log").write_text("1")
    return run(folder, "a.log", "3").returncode == 0 and contents(folder) == {"a.log": "", "a.log.1": "1"}


def several(folder):
    for text in "12345":
        (folder / "a.log").write_text(text)
        run(folder, "a.log", "3")
    return contents(folder) == {"a.log": "", "a.log.1": "5", "a.log.2": "4", "a.log.3": "3"}


def fewer_kept(folder):
    for name, text in (("a.log", "0"), ("a.log.1", "1"), ("a.log.2", "2"), ("a.log.3", "3")):
        (folder / name).write_text(text)
    return run(folder, "a.log", "1").returncode == 0 and contents(folder) == {"a.log": "", "a.log.1": "0"}


def spaces(folder):
    (folder / "my log").write_text("1")
    run(folder, "my log", "2")
    return contents(folder) == {"my log": "", "my log.1": "1"}


def permissions(folder):
    (folder / "a.log").write_text("1")
    (folder / "a.log").chmod(0o640)
    run(folder, "a.log", "2")
    return [stat.S_IMODE((folder / name).stat().st_mode) for name in ("a.log", "a.log.1")] == [0o640, 0o640]


def refusals(folder):
    (folder / "a.log").write_text("1")
    for arguments in (["gone.log", "3"], ["a.log", "0"], ["a.log", "x"], ["a.log", "-1"], ["a.log"]):
        done = run(folder, *arguments)
        if done.returncode != 1 or not done.stderr or contents(folder) != {"a.log": "1"}:
            return False
    return True


def passes(case):
    with tempfile.TemporaryDirectory() as folder:
        try:
            return case(Path(folder))
        except OSError:
            return False


CASES = [first, several, fewer_kept, spaces, permissions, refusals]
RIGHT = [case.__name__ for case in CASES if passes(case)]
print("right:", ", ".join(RIGHT) or "nothing")
print(len(RIGHT) / len(CASES))
