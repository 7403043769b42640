"""Runs the unittest files beside it over the repository in the current directory, and writes JUnit XML to the path it is given.

Standard library only: it goes into the runtime with the hidden tests, and an image need have nothing but python3.
"""

import sys
import unittest
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement


class Report(unittest.TestResult):
    """JUnit XML of what happened; a test's name is its method, its class name `<module>.<class>`."""

    def __init__(self):
        super().__init__()
        self.suite = Element("testsuite", name="hidden")

    def addSuccess(self, test):
        self._case(test)

    def addFailure(self, test, err):
        self._case(test, "failure", err)

    def addError(self, test, err):
        self._case(test, "error", err)

    def addSkip(self, test, reason):
        self._case(test, "skipped", reason)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self._case(test, "failure", err)

    def _case(self, test, outcome=None, why=None):
        classname, _, name = test.id().rpartition(".")
        case = SubElement(self.suite, "testcase", classname=classname, name=name)
        if outcome is not None:
            message = why if isinstance(why, str) else self._exc_info_to_string(why, test)
            SubElement(case, outcome, message=message[-2000:])


def main():
    hidden = Path(__file__).resolve().parent
    sys.path[:0] = [str(hidden), str(Path.cwd())]
    names = sorted(path.stem for path in hidden.glob("check_*.py"))
    suite = unittest.defaultTestLoader.loadTestsFromNames(names)
    report = Report()
    suite.run(report)
    ElementTree(report.suite).write(sys.argv[1], encoding="utf-8", xml_declaration=True)


if __name__ == "__main__":
    main()
