"""What can go wrong with a harness before it runs.

HarnessError
├── UnknownHarness        no definition of that name or at that path
├── BadDefinition         a definition breaks a rule of its format
│   ├── UnknownField      a field that the format does not have
│   ├── UnknownPlaceholder  `{name}` with a name that stands for nothing
│   └── OutsideHome       a file that would be written outside the harness's home
├── NotTaken              a task passes on what the harness has no place for
├── PromptTooLong         the system passes no argument of that length
├── MissingExecutable     there is no such command on PATH
└── CannotStart           the command is there, and the system does not run it
"""

from __future__ import annotations


class HarnessError(Exception):
    """The message names the value and the rule it broke."""


class UnknownHarness(HarnessError):
    pass


class BadDefinition(HarnessError):
    pass


class UnknownField(BadDefinition):
    pass


class UnknownPlaceholder(BadDefinition):
    pass


class OutsideHome(BadDefinition):
    pass


class NotTaken(HarnessError):
    pass


class PromptTooLong(HarnessError):
    pass


class MissingExecutable(HarnessError):
    pass


class CannotStart(HarnessError):
    pass
