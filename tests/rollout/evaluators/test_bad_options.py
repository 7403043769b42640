"""Options that no evaluation can work with: refused by name when the task is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.evaluators.base import BadEvaluator
from tests.support.runtimes.evaluations import check

OPTIONS: dict[str, Any] = {"rubric": "10 for a poem that rhymes.", "model": "judge-70b"}
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "command": [
        ({}, "option 'command' is missing"),
        ({"command": ""}, "option 'command' must be a text"),
        ({"command": []}, "option 'command' is an empty command"),
        ({"command": ["a", 1]}, "option 'command' must be a list of texts"),
        ({"command": "a", "reward": "printed"}, "option 'reward' cannot be 'printed': choose one of exit_code, number, json"),
        ({"command": "a", "reward": "number", "pattern": "("}, "option 'pattern' is no regular expression"),
        ({"command": "a", "reward": "number", "pattern": "(a)(b)"}, "option 'pattern' has 2 groups"),
        ({"command": "a", "pattern": "a"}, "option 'pattern' belongs to reward number"),
        ({"command": "a", "any_exit": True}, "option 'any_exit' belongs to reward number or json"),
        ({"command": "a", "any_exit": "yes", "reward": "json"}, "option 'any_exit' must be true or false"),
        ({"command": "a", "exit_rewards": {"one": 1}}, "option 'exit_rewards' must map exit codes"),
        ({"command": "a", "exit_rewards": {"1": float("nan")}}, "option '1' must be a finite number"),
        ({"command": "a", "exit_rewards": {"1": 1}, "reward": "json"}, "option 'exit_rewards' belongs to reward exit_code"),
        ({"command": "a", "env": {"A": 1}}, "option 'env' must map names to texts"),
        ({"command": "a", "files": {"f": 1}}, "option 'files' must give 'f' a text"),
        ({"command": "a", "files": {"f": {"base64": "%"}}}, "option 'files' gives 'f' something that is no content"),
        ({"command": "a", "remove": ["a/.."]}, "option 'remove' must name files to remove"),
        ({"command": "a", "remove": "../a"}, "option 'remove' must name files to remove"),
        ({"command": "a", "remove": ["//"]}, "option 'remove' must name files to remove"),
        ({"command": "a", "timeout_seconds": 0}, "option 'timeout_seconds' must be greater than 0"),
        ({"command": "a", "timeout_seconds": True}, "option 'timeout_seconds' must be a finite number"),
        ({"command": "a", "timeout_reward": 0}, "option 'timeout_reward' needs the option 'timeout_seconds'"),
        ({"command": "a", "timeout_reward": 0, "timeout_seconds": 600}, "option 'timeout_seconds' is 600 and must be below"),
    ],
    "harbor": [
        ({}, "option 'tests' lacks test.sh"),
        ({"tests": {"test.sh": 1}}, "option 'tests' must give 'test.sh' a text"),
        ({"tests": {"test.sh": "", "../x": ""}}, "option 'tests' must hold paths below the tests folder, not '../x'"),
        ({"tests": {"test.sh": "", "/x": ""}}, "option 'tests' must hold paths below the tests folder"),
        ({"tests": {"test.sh": ""}, "network": "none"}, "option 'network' cannot be 'none': choose one of proxy, full"),
        ({"tests": {"test.sh": ""}, "tests_folder": "/"}, "option 'tests_folder' must name files to remove"),
    ],
    "http": [
        ({}, "option 'url' is missing"),
        ({"url": "ftp://a"}, "option 'url' must be an http or https URL"),
        ({"url": "http://"}, "option 'url' must be an http or https URL"),
        ({"url": "http://a:b"}, "option 'url' must be an http or https URL"),
        ({"url": "http://a", "token_variable": "VERBATIM_ADMIN_TOKEN"}, "option 'token_variable' must begin with"),
        ({"url": "http://a", "calls": "some"}, "option 'calls' cannot be 'some'"),
        ({"url": "http://a", "retries": -1}, "option 'retries' must be a whole number from 0 to 100"),
        ({"url": "http://a", "retries": 1.5}, "option 'retries' must be a whole number"),
        ({"url": "http://a", "headers": {"a": 1}}, "option 'headers' must map names to texts"),
        ({"url": "http://a", "timeout_seconds": -1}, "option 'timeout_seconds' must be greater than 0"),
    ],
    "llm_judge": [
        ({"model": "m"}, "option 'rubric' is missing"),
        ({"rubric": "r"}, "option 'model' is missing"),
        ({**OPTIONS, "show": ["thoughts"]}, "option 'show' cannot hold 'thoughts'"),
        ({**OPTIONS, "minimum": 1, "maximum": 1}, "option 'maximum' must be greater than the minimum"),
        ({**OPTIONS, "template": "{rubric}"}, r"option 'template' lacks \{material\}"),
        ({**OPTIONS, "tries": 0}, "option 'tries' must be at least 1"),
        ({**OPTIONS, "sampling": []}, "option 'sampling' must be an object"),
    ],
    "pytest": [
        ({"report": "."}, "option 'report' must name files"),
        ({"report": 3}, "option 'report' must be a list of texts"),
        ({"mode": "some"}, "option 'mode' cannot be 'some'"),
        ({"must_pass": {"a": 1}}, "option 'must_pass' must be a list of texts"),
        ({"must_keep": [1]}, "option 'must_keep' must be a list of texts"),
    ],
    "python": [
        ({}, "option 'entry' is missing"),
        ({"entry": "module.function"}, "option 'entry' must be module:function, not 'module.function'"),
        ({"entry": "m:f()"}, "option 'entry' must be module:function"),
        ({"entry": "m:f", "arguments": [1]}, "option 'arguments' must be an object"),
    ],
}


@pytest.mark.parametrize(("kind", "options", "said"), [(kind, *case) for kind, cases in BAD.items() for case in cases])
def test_options_that_cannot_be_used_are_refused_by_name(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadEvaluator, match=said):
        check(kind, options)
