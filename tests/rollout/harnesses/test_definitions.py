"""Harness definitions: the built-in ones, a user's own, what a placeholder is, and what a harness gets to see."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from contract.tasks import HarnessSpec, McpServer, Upload
from reconstruct.records import DECLARED, INFERRED
from reconstruct.roles import Marks, Purpose, RoleRule, encode_rule, find_purpose
from rollout.harnesses.catalogue import VARIABLE, load, names
from rollout.harnesses.definition import Harness, check_accepted, parse
from rollout.harnesses.limits import UNKNOWN, Limits
from rollout.harnesses.prepared import (
    NAMES,
    BadDefinition,
    HarnessError,
    NotTaken,
    OutsideHome,
    Prepared,
    SessionAccess,
    UnknownBaseUrl,
    UnknownField,
    UnknownHarness,
    UnknownPlaceholder,
    build_environment,
    check,
    fill,
    fill_file,
    is_withheld,
)
from tests import ROOT
from tests.deploy.test_packaging import MODEL_LIBRARIES, SERVICE_LIBRARIES, import_in_a_fresh_process, modules_of
from tests.support.service.verbatim_process import verbatim

DOCS = (ROOT / "docs" / "harnesses.md").read_text()
EXPECTED = {
    "aider": "chat",
    "claude-code": "messages",
    "cline": "chat",
    "codex": "responses",
    "continue": "chat",
    "copilot-cli": "chat",
    "droid": "chat",
    "gemini-cli": "gemini",
    "gptme": "chat",
    "kilo": "chat",
    "kimi-cli": "chat",
    "llm": "chat",
    "mini-swe-agent": "chat",
    "mistral-vibe": "chat",
    "openai-agents": "responses",
    "opencode": "chat",
    "openhands": "chat",
    "pi": "chat",
    "qwen-code": "chat",
    "shell": "any",
}
SDKS = {
    *("OpenAI SDKs", "OpenAI Agents SDK", "Anthropic SDK", "Claude Agent SDK", "Google Gen AI SDK", "Google ADK"),
    *("Vercel AI SDK", "Mastra", "LiteLLM", "LangChain", "deepagents", "PydanticAI", "Strands", "semantic-kernel", "Inspect"),
    *("smolagents", "DSPy", "Instructor"),
}
ROOT_URL = "http://127.0.0.1:8700/s/abc"
ENDPOINT = SessionAccess({"openai": f"{ROOT_URL}/v1", "anthropic": ROOT_URL, "gemini": ROOT_URL}, "vk-abc")
LEAST = {"description": "one", "dialect": "chat", "argv": ["agent", "{prompt}"]}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.fixed_dictionaries(dict.fromkeys(NAMES, texts))


def prepared(
    harness: Harness, prompt: str | list[str] = "Fix it.", model: str = "policy", home: str = "/h", limits: Limits = UNKNOWN
) -> Prepared:
    return harness.prepare(ENDPOINT, model, prompt, Path(home), workdir=Path("/w"), limits=limits)


def everything(ready: Prepared) -> list[str]:
    return [*ready.argv, *ready.env.values(), *ready.files.values()]


def write_definition(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def test_the_built_in_harnesses_are_these() -> None:
    assert {name: load(name).dialect for name in names()} == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_a_built_in_definition_says_what_it_is_and_how_to_get_it(name: str) -> None:
    harness = load(name)
    assert harness.name == name and harness.description and "\n" not in harness.description
    if name != "shell":
        assert harness.install and harness.version
        assert f"{harness.version} " in f"{harness.install[0]} ", "the install line pins the tested version"
        assert harness.takes_prompt and harness.takes_model and not harness.takes_command


@pytest.mark.parametrize("name", EXPECTED)
def test_a_built_in_harness_is_pointed_at_the_session_and_nowhere_else(name: str) -> None:
    ready = prepared(load(name))
    found = [url for text in everything(ready) for url in re.findall(r"https?://[^\s\"',]+", text)]
    assert found and all(url.startswith(ROOT_URL) for url in found)
    assert any("vk-abc" in text for text in everything(ready))


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"shell"}))
def test_a_prompt_is_one_argument_word_for_word(name: str) -> None:
    prompt = "line one\n'two' \"three\" {model} ${HOME} {{x}} \\ end"
    assert [word.partition("=")[2] if word.startswith("--") else word for word in prepared(load(name), prompt).argv].count(
        prompt
    ) == 1


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("model", ["policy", "Qwen/Qwen3-0.6B", 'odd"name\\with{braces}'])
@pytest.mark.parametrize("limits", [UNKNOWN, Limits(52_000), Limits(None, (512,))], ids=["unknown", "known", "replies only"])
def test_the_files_of_a_built_in_harness_are_well_formed_whatever_is_known(name: str, model: str, limits: Limits) -> None:
    for path, text in prepared(load(name), model=model, limits=limits).files.items():
        if path.endswith(".json"):
            json.loads(text)
        elif path.endswith(".toml"):
            tomllib.loads(text)
        elif path.endswith(".yaml"):
            assert json.dumps(model) in json.dumps(yaml.safe_load(text))
        else:
            ast.parse(text)


def test_the_help_of_the_commands_names_every_built_in_harness() -> None:
    for command in ("run", "env"):
        # Lines end at hyphens too.
        shown = " ".join(verbatim(command, "--help").stdout.split()).replace("- ", "-")
        assert [name for name in EXPECTED if f" {name}," not in shown] == []


def test_the_page_about_harnesses_names_every_built_in_one_with_its_version() -> None:
    table = DOCS.partition("## Built in")[2].partition("## Context windows")[0]
    split = [[cell.strip(" `") for cell in line.split("|")] for line in table.splitlines() if line.count("|") > 4]
    rows = {cells[1]: cells for cells in split}
    for name in EXPECTED:
        harness = load(name)
        assert harness.dialect in rows[name] and (harness.version or "-") in rows[name]


def test_the_page_says_of_each_built_in_harness_how_it_is_told_the_window_if_it_is() -> None:
    table = DOCS.partition("## Context windows")[2].partition("## SDKs and frameworks")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
    told = {name.strip("` "): how for names, how, *_ in rows for name in names.split(",")}
    assert {name: how != "-" for name, how in told.items()} == {
        name: load(name).takes_limits for name in EXPECTED if name != "shell"
    }


def test_the_page_says_of_each_sdk_which_base_url_it_takes_and_how_many_rows_to_expect() -> None:
    """The base URLs with what an SDK's own paths begin with."""
    table = DOCS.partition("## SDKs and frameworks")[2].partition("## Add one")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")][2:]
    assert {name for sdks, *_ in rows for name in sdks.split(", ")} == SDKS
    taken = {url for _, urls, *_ in rows for url in re.findall(r"`(\{[^`]*)`", urls)}
    assert taken == {"{openai}", "{anthropic}", "{anthropic}/v1", "{gemini}", "{gemini}/v1beta"}
    assert all(given and expected for *_, given, expected in rows)


def test_the_definitions_name_the_versions_that_are_tested() -> None:
    tested = ROOT / "tests" / "harnesses"
    pinned = [
        f"{name}@{version}" for name, version in json.loads((tested / "package.json").read_text())["dependencies"].items()
    ]
    # browser-use is a library, which a program of the tests uses.
    pinned += [path.read_text().splitlines()[-1] for path in tested.glob("*.txt") if path.stem != "browser-use"]
    installs = " ".join(f"{line} " for name in names() for line in load(name).install)
    assert [each for each in pinned if f" {each} " not in installs] == []
    assert len(pinned) == 14


def test_the_page_about_harnesses_names_every_placeholder_and_every_field() -> None:
    assert [name for name in NAMES if f"`{{{name}}}`" not in DOCS] == []
    assert [name for name in Harness.__dataclass_fields__ if f"`{name}`" not in DOCS] == []


def test_the_example_on_the_page_is_a_definition(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    ready = prepared(load(str(write_definition(tmp_path, "my-agent", example))))
    assert ENDPOINT.base_urls["openai"] in "".join(everything(ready)) and "Fix it." in ready.argv


def test_a_definition_is_found_by_its_path(tmp_path: Path) -> None:
    path = write_definition(tmp_path, "mine", 'description = "d"\ndialect = "chat"\nargv = ["x", "{prompt}"]\n')
    assert load(str(path)) == Harness("mine", "d", "chat", ("x", "{prompt}"))


def test_a_definition_in_the_users_folder_is_found_by_its_name_and_wins(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("mine", "codex"):
        write_definition(tmp_path, name, 'description = "of the user"\ndialect = "chat"\nargv = ["x"]\n')
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert names() == sorted({*EXPECTED, "mine"})
    assert load("mine").description == load("codex").description == "of the user"


def test_a_definition_that_cannot_be_found_or_read_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UnknownHarness, match=r"'codecs'.*codex"):
        load("codecs")
    with pytest.raises(UnknownHarness, match=r"none\.toml"):
        load(str(tmp_path / "none.toml"))
    with pytest.raises(BadDefinition, match=r"broken\.toml"):
        load(str(write_definition(tmp_path, "broken", "argv = [")))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(UnknownHarness, match=f"{VARIABLE} names .*gone"):
        names()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"args": ["x"]}, UnknownField, "'args'"),
        ({"dialect": "a dialect"}, BadDefinition, "dialect: 'a dialect' is not made of"),
        ({"stdin": "tty"}, BadDefinition, "stdin cannot be 'tty'"),
        ({"argv": "agent {prompt}"}, BadDefinition, "argv must be a list of strings"),
        ({"env": {"PORT": 1}}, BadDefinition, "env must be a table of strings"),
        ({"description": 3}, BadDefinition, "description must be a string"),
        ({"env": {"BAD NAME": "x"}}, BadDefinition, "'BAD NAME'"),
        ({"unset": ["A=B"]}, BadDefinition, "'A=B'"),
        ({"name": "Big Name"}, BadDefinition, "'Big Name'"),
        ({"argv": ["agent", "{promt}"]}, UnknownPlaceholder, r"argv: \{promt\}"),
        ({"env": {"URL": "{base_url}"}}, UnknownPlaceholder, r"env URL: \{base_url\}"),
        ({"files": {"a.json": '{"u": "{url}"}'}}, UnknownPlaceholder, r"file a.json: \{url\}"),
        ({"files": {"../a": ""}}, OutsideHome, r"'\.\./a'"),
        ({"files": {"a/../../b": ""}}, OutsideHome, "below it"),
        ({"files": {"/etc/passwd": ""}}, OutsideHome, "/etc/passwd"),
        ({"files": {"": ""}}, OutsideHome, "''"),
        ({"files": {"folder/": ""}}, OutsideHome, "folder/"),
        ({"roles": {"role": "side"}}, BadDefinition, "roles must be a list of tables"),
        ({"roles": [{"role": "aside"}]}, BadDefinition, "'aside' is not one of main"),
        ({"roles": [{"role": "side", "words": "x"}]}, BadDefinition, "'words'.*any of role, header"),
        ({"roles": [{"role": "side", "system": "("}]}, BadDefinition, "is invalid"),
        ({"roles": [{"role": "side", "header": 1}]}, BadDefinition, "roles:"),
        ({"finished_exit_codes": ["1"]}, BadDefinition, "finished_exit_codes must be a list of integers"),
        ({"finished_exit_codes": [True]}, BadDefinition, "finished_exit_codes must be a list of integers"),
        ({"finished_exit_codes": [1, 137]}, BadDefinition, "137 is not one of 1 to 125"),
    ],
)
def test_a_definition_that_breaks_a_rule_is_refused_by_name(
    change: dict[str, Any], kind: type[HarnessError], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        parse({**LEAST, **change}, "mine")
    assert "mine" in str(caught.value) or "name" in change


def test_a_definition_may_name_a_dialect_that_only_the_service_knows() -> None:
    """The service said which base URLs it has: a definition is checked against them when a session is there."""
    url = "{base_url:toy}"
    harness = parse({**LEAST, "dialect": "toy", "env": {"TOY": url, "OPENAI": "{base_url:openai} {openai}"}}, "mine")
    toy = SessionAccess({**ENDPOINT.base_urls, "toy": f"{ROOT_URL}/toy"}, "vk-abc")
    env = harness.prepare(toy, "policy", "Fix it.", Path("/h")).env
    assert env == {"TOY": f"{ROOT_URL}/toy", "OPENAI": f"{ROOT_URL}/v1 {ROOT_URL}/v1"}
    with pytest.raises(UnknownBaseUrl, match=r"\{base_url:toy\}.*it has anthropic, gemini, openai"):
        prepared(harness)


def test_a_definition_needs_a_dialect_and_no_description() -> None:
    assert parse({"dialect": "chat", "argv": ["agent"]}, "mine").description == ""
    with pytest.raises(BadDefinition, match="dialect is missing"):
        parse({"argv": ["agent"]}, "mine")


def test_everything_that_is_wrong_with_a_definition_is_said_at_once() -> None:
    with pytest.raises(BadDefinition) as caught:
        parse({"argv": "agent", "env": {"A": 1}, "arguments": [], "flags": []}, "mine")
    said = str(caught.value)
    for problem in ("no field 'arguments' or 'flags'", "dialect is missing", "argv must be a list", "env must be a table"):
        assert problem in said


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages", "gemini", "any", "toy"])
@pytest.mark.parametrize("env", [{}, {"DEBUG": "1"}])
def test_a_definition_that_says_nothing_of_url_and_key_gets_the_usual_variables(dialect: str, env: dict[str, str]) -> None:
    """The agent was started with neither, and died of an error of its own."""
    given = prepared(parse({"dialect": dialect, "argv": ["agent"], **({"env": env} if env else {})}, "mine")).env
    usual = prepared(load("shell")).env
    openai, anthropic, gemini = (
        {name: value for name, value in usual.items() if name.startswith(prefixes)}
        for prefixes in ("OPENAI_", "ANTHROPIC_", ("GOOGLE_", "GEMINI_"))
    )
    of = {"messages": anthropic, "gemini": gemini, "any": usual, "toy": usual}
    assert given == {**of.get(dialect, openai), **env}
    assert any(value == "vk-abc" for value in given.values()) and any(value.startswith(ROOT_URL) for value in given.values())


@pytest.mark.parametrize(
    "place", [{"env": {"MY_KEY": "{api_key}"}}, {"argv": ["agent", "--url={base_url:toy}"]}, {"files": {"a": "{openai}"}}]
)
def test_a_definition_that_says_how_it_is_given_url_or_key_gets_nothing_else(place: dict[str, Any]) -> None:
    assert parse({"dialect": "chat", "argv": ["agent"], **place}, "mine").variables == place.get("env", {})


def test_the_roles_of_a_definition_are_rules_of_the_service() -> None:
    roles = [{"role": "side", "tools": False}, {"role": "subagent", "header": "X-Agent", "agent_header": "X-Agent"}]
    rules = (RoleRule("side", tools=False), RoleRule("subagent", header="x-agent", agent_header="x-agent"))
    assert parse({**LEAST, "roles": roles}, "mine").roles == rules
    assert [RoleRule(**encode_rule(rule)) for rule in rules] == list(rules)


def test_braces_that_are_no_placeholder_stay() -> None:
    text = '{"a": {"b": {}}, "c": [{1}]} ${model} {{model}} {A} {a-b} { model } %s'
    check(text, "here")
    assert fill(text, dict.fromkeys(NAMES, "X")) == text.replace("{{model}}", "{model}")


@given(values, st.lists(st.sampled_from([*(f"{{{name}}}" for name in NAMES), " ", "{}", "x", "}", '{"a":'])))
def test_every_placeholder_becomes_its_value_once_and_nothing_else_changes(given_values: Any, parts: list[str]) -> None:
    """Also when a value looks like a placeholder itself."""
    expected = "".join(given_values.get(part[1:-1], part) if part != "{}" else part for part in parts)
    assert fill("".join(parts), given_values) == expected


@given(values)
def test_values_come_back_from_json_toml_and_yaml_files_as_they_were(given_values: Any) -> None:
    as_json = "{" + ", ".join(f'"{name}": "{{{name}}}"' for name in NAMES) + "}"
    assert json.loads(fill_file("a/settings.json", as_json, given_values)) == given_values
    as_toml = "\n".join(f'{name} = "{{{name}}}"' for name in NAMES)
    assert tomllib.loads(fill_file("a/config.toml", as_toml, given_values)) == given_values
    as_yaml = "\n".join(f'{name}: "{{{name}}}"' for name in NAMES)
    assert yaml.safe_load(fill_file("a/config.yaml", as_yaml, given_values)) == given_values


@given(texts)
def test_a_file_of_another_kind_gets_the_value_as_it_is(prompt: str) -> None:
    assert fill_file("task.md", "# {prompt}", {"prompt": prompt}) == f"# {prompt}"


DONE: dict[str, Any] = {
    **{"role": "main", "status": "finished", "delivered": True, "finish_reason": "stop", "invalid_tool_call": False},
    **{"reply": {"content": "Done."}, "started_at": 5.0},
}
WORK: dict[str, Any] = {**DONE, "started_at": 2.0, "finish_reason": "tool_calls", "reply": {"tool_calls": [{"id": "a"}]}}
ENDS_WORK = {
    "the last reply calls no tool": [WORK, DONE],
    "in any order": [DONE, WORK],
    "a title came later": [WORK, DONE, {**WORK, "role": "side", "started_at": 6.0}],
    "another candidate was not chosen": [
        WORK,
        DONE,
        {**WORK, "lookahead": "not_chosen", "delivered": False, "started_at": 5.5},
    ],
}
BREAKS_OFF = {
    "no call": [],
    "the last reply calls a tool": [WORK],
    "it says stop, and calls a tool": [{**DONE, "reply": {"tool_calls": [{"id": "a"}]}}],
    "it calls a tool in words that nobody could parse": [{**DONE, "invalid_tool_call": True}],
    "the reply was cut at its limit": [WORK, {**DONE, "finish_reason": "length"}],
    "the engine broke off": [WORK, {**DONE, "status": "failed", "finish_reason": None, "reply": None}],
    "the reply did not reach it": [WORK, {**DONE, "delivered": False}],
    "a call is still going on": [
        DONE,
        {**DONE, "status": "in_flight", "finish_reason": None, "reply": None, "started_at": 7.0},
    ],
    "the history was just summed up": [DONE, {**DONE, "role": "compaction", "started_at": 7.0}],
    "a sub-agent ended": [WORK, {**DONE, "role": "subagent"}],
}


@pytest.mark.parametrize(
    ("calls", "ended"),
    [*((calls, True) for calls in ENDS_WORK.values()), *((calls, False) for calls in BREAKS_OFF.values())],
    ids=[*ENDS_WORK, *BREAKS_OFF],
)
def test_an_exit_code_of_finished_work_counts_where_the_last_reply_ended_it(calls: list[dict[str, Any]], ended: bool) -> None:
    harness = parse({**LEAST, "finished_exit_codes": [1]}, "mine")
    assert harness.has_finished(1, calls) == ended
    assert harness.has_finished(0, calls) and not harness.has_finished(2, calls)
    assert not parse(LEAST, "mine").has_finished(1, calls), "its definition does not say so"


LIMITED = {
    "description": "one",
    "dialect": "chat",
    "argv": ["agent", "--context={window}", "--reply={max_output:4096}", "{prompt}"],
    "env": {"CONTEXT": "{window}", "BOTH": "{max_input} of {window}", "REPLY": "{max_output}", "URL": "{openai}"},
    "files": {
        "a.json": '{\n"limit": {"context": {window}, "output": {max_output}},\n"share": {max_input/1048576},\n"url": "{openai}"\n}'
    },
}


def test_a_harness_is_told_the_window_and_its_share_for_prompts_and_replies() -> None:
    harness = parse(LIMITED, "mine")
    assert harness.takes_limits and not parse(LEAST, "mine").takes_limits
    ready = prepared(harness, limits=Limits(52_000))
    assert ready.argv == ("agent", "--context=52000", "--reply=13000", "Fix it.")
    url = ENDPOINT.base_urls["openai"]
    assert ready.env == {"CONTEXT": "52000", "BOTH": "39000 of 52000", "REPLY": "13000", "URL": url}
    limit, share = {"context": 52_000, "output": 13_000}, pytest.approx(39_000 / 1_048_576, abs=1e-6)
    assert json.loads(ready.files["a.json"]) == {"limit": limit, "share": share, "url": url}


def test_what_needs_an_unknown_window_is_left_out_word_by_word_and_line_by_line() -> None:
    """A number after the name stands in for it. A prompt that looks like a placeholder is nobody's."""
    ready = prepared(parse(LIMITED, "mine"), prompt="{window}")
    assert ready.argv == ("agent", "--reply=4096", "{window}")
    assert ready.env == {"URL": ENDPOINT.base_urls["openai"]}
    assert json.loads(ready.files["a.json"]) == {"url": ENDPOINT.base_urls["openai"]}
    capped = prepared(parse(LIMITED, "mine"), limits=Limits(None, (512,)))
    assert capped.argv == ("agent", "--reply=512", "Fix it.") and capped.env["REPLY"] == "512"


@given(st.integers(1, 2**31), st.lists(st.integers(1, 2**40), max_size=2))
def test_prompt_and_reply_share_the_window_and_no_reply_exceeds_a_limit(window: int, most_sampled: list[int]) -> None:
    limits = Limits(window, tuple(most_sampled))
    assert limits.max_output is not None and limits.max_input is not None
    assert 1 <= limits.max_output <= min([32_768, max(1, window // 4), *most_sampled])
    assert limits.max_input == max(1, window - min(32_768, max(1, window // 4))), "of the run's limits it is independent"


def test_a_command_is_its_words_and_a_text_a_line_for_sh_or_a_file_if_it_is_too_long() -> None:
    shell = load("shell")
    assert prepared(shell, ["python", "-c", "print(1)", "a b"]).argv == ("python", "-c", "print(1)", "a b")
    assert prepared(shell, "a | b").argv == ("sh", "-c", "a | b")
    assert prepared(shell, "#" * 131071).argv[1] == "-c"
    ready = prepared(shell, "#" * 131072)
    assert ready.argv == ("sh", "/h/.verbatim-command") and ready.files[".verbatim-command"] == "#" * 131072
    assert prepared(parse(LEAST, "mine"), ["Fix", "the test"]).argv == ("agent", "Fix the test"), "a prompt is one text"


def test_the_home_and_the_working_directory_are_filled_in() -> None:
    harness = parse({**LEAST, "argv": ["{home}/x", "{workdir}", "{prompt}"]}, "mine")
    assert prepared(harness, "p").argv == ("/h/x", "/w", "p")


def test_files_are_written_below_the_home_for_their_owner_alone(tmp_path: Path) -> None:
    ready = parse({**LEAST, "files": {".a/b.txt": "{api_key}", "c": "2"}}, "mine").prepare(ENDPOINT, "m", "p", tmp_path)
    assert ready.write(tmp_path) == [tmp_path / ".a/b.txt", tmp_path / "c"]
    assert (tmp_path / ".a/b.txt").read_text() == "vk-abc"
    assert (tmp_path / ".a/b.txt").stat().st_mode & 0o777 == 0o600
    (tmp_path / "c").write_text("changed")
    ready.write(tmp_path)
    assert (tmp_path / "c").read_text() == "2"


def test_a_link_that_leads_out_of_the_home_is_not_followed(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir()
    outside.mkdir()
    (home / ".agent").symlink_to(outside)
    with pytest.raises(OutsideHome, match="outside"):
        prepared(parse({**LEAST, "files": {".agent/x": "1"}}, "mine")).write(home)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "variable",
    [
        *("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_MODEL", "GEMINI_API_KEY", "GOOGLE_CLOUD_PROJECT", "CLAUDECODE"),
        *("HTTPS_PROXY", "http_proxy", "ALL_PROXY", "VERBATIM_ADMIN_TOKEN", "VERBATIM_URL", "HF_TOKEN", "GITHUB_TOKEN"),
        *("COPILOT_MODEL", "CLINE_DIR", "CONTINUE_GLOBAL_DIR", "KILO_CONFIG", "LLM_BASE_URL", "VIBE_HOME", "KIMI_BASE_URL"),
        *("MY_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "XDG_CONFIG_HOME", "SSH_AUTH_SOCK", "CODEX_HOME", "PI_OFFLINE"),
    ],
)
def test_what_would_lead_a_harness_elsewhere_or_is_secret_is_withheld(variable: str) -> None:
    assert is_withheld(variable)


@pytest.mark.parametrize(
    "variable", ["PATH", "LANG", "TERM", "VIRTUAL_ENV", "PYTHONPATH", "NO_PROXY", "PIP_INDEX_URL", "TOKENIZERS_PARALLELISM"]
)
def test_what_a_task_may_need_is_kept(variable: str) -> None:
    assert not is_withheld(variable)


def test_the_surroundings_are_the_callers_with_a_home_of_their_own() -> None:
    ready = Prepared(("x",), {"OPENAI_API_KEY": "vk", "LANG": "C"}, {}, ("EDITOR",))
    outer = {"PATH": "/bin", "HOME": "/home/me", "LANG": "de", "EDITOR": "vi", "OPENAI_API_KEY": "mine", "HTTP_PROXY": "p"}
    assert build_environment(outer, ready, Path("/h"), {"HTTP_PROXY": "given"}) == {
        "PATH": "/bin",
        "HOME": "/h",
        "TMPDIR": "/h/tmp",
        "LANG": "C",
        "OPENAI_API_KEY": "vk",
        "HTTP_PROXY": "given",
    }


def test_harnesses_need_nothing_but_the_base_install(tmp_path: Path) -> None:
    blocked = [*SERVICE_LIBRARIES, *MODEL_LIBRARIES]
    loaded = import_in_a_fresh_process(tmp_path, modules_of("rollout/harnesses"), blocked).loaded
    assert not loaded & {"proxy", "trainer_client", "cli"}


SERVERS = (McpServer("files", ("node", 'a "b" \\ c'), {"KEY": "x=y"}), McpServer("far", url="http://example.test/mcp"))


@pytest.mark.parametrize("name", [name for name in EXPECTED if load(name).mcp is not None])
def test_the_servers_of_a_task_stand_in_the_harness_configuration_beside_what_was_there(name: str) -> None:
    harness = load(name)
    assert harness.mcp is not None
    plain = harness.prepare(ENDPOINT, "m", "hi", Path("/home/x")).files.get(harness.mcp.file, "")
    told = harness.prepare(ENDPOINT, "m", "hi", Path("/home/x"), servers=SERVERS).files[harness.mcp.file]
    read = json.loads if harness.mcp.file.endswith(".json") else tomllib.loads
    before, after = read(plain) if plain else {}, read(told)
    entries = after.pop(harness.mcp.table)
    assert after == before
    assert set(entries) == {"files", "far"}
    command = entries["files"]["command"]
    words = command if isinstance(command, list) else [command, *entries["files"]["args"]]
    assert words == list(SERVERS[0].command)
    assert entries["files"].get("env", entries["files"].get("environment")) == {"KEY": "x=y"}
    assert SERVERS[1].url in entries["far"].values()


@pytest.mark.parametrize(
    ("harness", "given", "says"),
    [
        ("aider", {"mcp_servers": SERVERS}, "aider takes no MCP servers"),
        ("mini-swe-agent", {"skills": (Upload("s", b""),)}, "mini-swe-agent takes no skills"),
        ("codex", {"mcp_servers": (McpServer("a b", ("x",)),)}, "'a b' cannot be the name"),
        ("codex", {"mcp_servers": (SERVERS[0], SERVERS[0])}, "two MCP servers are called 'files'"),
        ("codex", {"skills": (Upload("../s", b""),)}, "'../s' is not a path below"),
    ],
)
def test_what_a_harness_has_no_place_for_is_refused(harness: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(NotTaken, match=re.escape(says)):
        check_accepted(load(harness), HarnessSpec(harness, **given))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"file": "x.json", "table": "t"}, "neither command nor url"),
        ({"file": "x.ini", "table": "t", "url": {"u": "{url}"}}, "'x.ini' is none of"),
        ({"file": "x.json", "table": "t", "url": {"u": "{command}"}}, "{command} stands for nothing"),
        ({"file": "x.json", "url": {"u": "{url}"}}, "table is missing"),
        ({"file": "x.json", "table": "t", "urls": {}}, "no field 'urls'"),
        ({"file": "../x.json", "table": "t", "url": {"u": "{url}"}}, "stays below it"),
    ],
)
def test_a_form_for_servers_that_cannot_be_used_is_refused(form: dict[str, Any], says: str) -> None:
    with pytest.raises(BadDefinition, match=re.escape(says)):
        parse({**LEAST, "mcp": form}, "mine")


CLAUDE = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nYour task is to create a detailed summary of the conversation so far"
SUMMING_UP = "You are a helpful AI assistant tasked with summarizing conversations."
SAID: dict[str, tuple[bool, str, str]] = {
    "claude-code": (True, "You are Claude Code", CLAUDE),
    "codex": (False, "You are Codex", "You are performing a CONTEXT CHECKPOINT COMPACTION."),
    "gemini-cli": (False, "distilling chat history into a structured XML <state_snapshot>", "First, reason"),
    "qwen-code": (False, "distill the history into a <state_snapshot>", "First, reason"),
    "opencode": (False, SUMMING_UP, "Sum up"),
    "pi": (False, "You are a context summarization assistant.", "<conversation>"),
    "kimi-cli": (False, "You compact the context of a conversation.", "..."),
    "openhands": (False, "", "You are maintaining a context-aware state summary"),
    "kilo": (False, SUMMING_UP, "Sum up"),
    "cline": (False, "You are a summarization assistant", "Summarize"),
    "droid": (False, "You are Droid", "Wrap your final summary in <summary> tags."),
    "continue": (
        True,
        "You are an agent in the Continue CLI",
        "Please provide a concise summary of our conversation so far, capturing the key context, decisions made",
    ),
    "gptme": (
        True,
        "You are gptme",
        "Context budget has been reached — produce a structured checkpoint before history is compacted.",
    ),
    "aider": (False, "*Briefly* summarize this partial conversation about programming.", "# USER"),
}
"""Whether a harness offers tools when it sums up, and its system prompt and last message then."""
COMPACTIONS = {name: Marks({}, tools, system, last, from_user=True) for name, (tools, system, last) in SAID.items()}


@pytest.mark.parametrize("name", COMPACTIONS)
def test_the_compaction_of_every_shipped_harness_is_declared_and_so_not_trained(name: str) -> None:
    """Claude Code's was trained with the rollout's reward, Codex's was not."""
    rules = load(name).roles
    assert find_purpose(COMPACTIONS[name], declared=rules) == Purpose("compaction", "", DECLARED)
    work = Marks({}, name != "aider", "You are an agent", "fix it", from_user=True)
    assert find_purpose(work, declared=rules).role == "main"


@pytest.mark.parametrize("name", COMPACTIONS)
def test_no_tool_result_makes_a_call_a_compaction(name: str) -> None:
    """An agent that prints a harness's own words would take its calls out of training."""
    for words in (each.last for each in COMPACTIONS.values()):
        for last in (words, f"{words} <state_snapshot> summarizing conversations"):
            read = find_purpose(Marks({}, True, "You are an agent", last, from_user=False), declared=load(name).roles)
            assert read.role == "main" or read.source == INFERRED
