"""What the rows of a real service say of how their tokens were sampled, against an engine that tells all that vLLM tells.

`service` runs a test once per engine path. Every number is worked out again from the ids: see scripted_details.py.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from proxy.engine.apis.reply import PromptLogprob, WantedDetails, read_details
from proxy.settings import Settings
from reconstruct.records import LOGPROB_MODES
from reconstruct.trajectory import Trajectory
from tests.support.engine.scripted_details import LAYERS, PER_TOKEN, experts, given_logprobs
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService, Session, streamed_text
from tests.support.sessions.conversations import TOOLS, tool_result, turn
from trainer_client import TrainerClient
from trainer_client.wire import decode_trajectory

TOP = 2
EVERYTHING = {"top_logprobs": TOP, "prompt_logprobs": True, "routed_experts": True}
A_CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "alpha"}}\n</tool_call>'


@pytest.fixture
def engine(running: Running) -> ScriptedEngine:
    engine = running[0].reset()
    engine.routes = True
    return engine


def rows_of(session: Session, builder: str = "merged") -> list[Trajectory]:
    return [decode_trajectory(row) for row in session.trajectories(builder)[0]]


def tool_turns(session: Session, engine: ScriptedEngine, **fields: Any) -> None:
    """A tool call, its result, and a reply: one row on the token path."""
    engine.say(A_CALL, "hello world")
    asked = [turn("user", "q")]
    message = session.ask(asked, tools=TOOLS, **fields).choices[0].message.model_dump(exclude_none=True)
    session.ask([*asked, message, tool_result(message, "sunny")], tools=TOOLS, **fields)


def check_given(row: Trajectory, *, without: Sequence[int] = ()) -> None:
    """Every token that was given has its logprob, but for the first and those at `without`."""
    assert row.details is not None and row.details.prompt_logprobs is not None
    ids, mask = row.token_ids.tolist(), row.loss_mask.tolist()
    told = given_logprobs(ids)
    expected = [None if mask[at] or at in without else told[at] for at in range(len(ids))]
    assert [None if np.isnan(value) else value for value in row.details.prompt_logprobs.tolist()] == expected


def check_top(row: Trajectory) -> None:
    assert row.details is not None and row.details.top_token_ids is not None and row.details.top_logprobs is not None
    trained = row.loss_mask == 1
    assert row.details.top_token_ids.shape == (len(row.token_ids), TOP)
    np.testing.assert_array_equal(row.details.top_token_ids[trained, 0], row.token_ids[trained])
    np.testing.assert_array_equal(row.details.top_logprobs[trained, 0], row.logprobs[trained])
    assert (row.details.top_logprobs[trained, 1] == -9.0).all() and (row.details.top_token_ids[~trained] == -1).all()


def check_routed(row: Trajectory) -> None:
    assert row.details is not None and row.details.routed_experts is not None
    table = row.details.routed_experts
    assert table.shape == (len(row.token_ids), LAYERS, PER_TOKEN)
    np.testing.assert_array_equal(table[:-1], experts(row.token_ids.tolist())[:-1])
    assert (table[-1] == -1).all()


# Details on the way from the engine to a row


@pytest.mark.parametrize("builder", ["merged", "per_call"])
def test_a_session_gets_what_it_asks_for_at_every_token(
    engine: ScriptedEngine, token_service: RunningService, builder: str
) -> None:
    session = token_service.session(sampling=EVERYTHING)
    tool_turns(session, engine)
    rows = rows_of(session, builder)
    assert len(rows) == (1 if builder == "merged" else 2)
    for row in rows:
        check_top(row)
        check_routed(row)
    first = session.calls[0]
    replied = range(len(first["prompt_ids"]), len(first["prompt_ids"]) + len(first["completion_ids"]))
    # The row of the second call alone has the first one's reply in its context: sampled, not given.
    check_given(rows[-1], without=replied)


def test_only_what_is_new_is_asked_for_and_stored(engine: ScriptedEngine, token_service: RunningService) -> None:
    """The experts of the first reply's last token come with the second call, which feeds it back."""
    session = token_service.session(sampling=EVERYTHING)
    tool_turns(session, engine)
    first, second = session.calls
    known = len(first["prompt_ids"]) + len(first["completion_ids"])
    starts = [made.sampling.get("routed_experts_prompt_start", 0) for made in engine.generations]
    assert starts == [0, known - 1]
    assert [made.sampling["skip_reading_prefix_cache"] for made in engine.generations] == [True, True]
    assert len(second["prompt_ids"]) > known


def test_experts_that_were_not_asked_for_again_are_found_whatever_is_recorded_meanwhile(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """Two agents of one session begin alike. The second one's prompt was stored on the call recorded last when it ended, which had not
    the beginning: nobody had its experts."""
    session, gate = token_service.session(sampling=EVERYTHING), threading.Event()
    system = turn("system", "You are an agent in Paris. " * 10)
    engine.say("hello world", Say("hello", gate=gate, gate_after=1))
    session.ask([system, turn("user", "one")])
    with ThreadPoolExecutor(1) as pool:
        try:
            late = pool.submit(session.ask, [system, turn("user", "two")])
            engine.wait_for(lambda: len(engine.generations) == 2)
            session.ask([turn("user", "three")], max_tokens=4)
        finally:
            gate.set()
        late.result(60)
    assert engine.generations[1].sampling["routed_experts_prompt_start"] > 0
    rows = rows_of(session)
    assert len(rows) == 3
    for row in rows:
        check_routed(row)


def test_streamed_replies_have_them_too(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say("hello world")
    session = service.session(sampling={"top_logprobs": TOP})
    text, _ = streamed_text(session.ask("q", stream=True))
    assert text == "hello world"
    (row,) = rows_of(session)
    check_top(row)


def test_with_prompt_logprobs_a_streamed_reply_comes_with_its_end(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """Only whole answers of the engine tell them."""
    engine.say("hello world", A_CALL)
    session = token_service.session(sampling=EVERYTHING)
    text, chunks = streamed_text(session.ask("q", stream=True))
    assert text == "hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    called = [
        piece for chunk in session.ask("r", stream=True, tools=TOOLS) for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert called[0].function.name == "lookup"
    assert [made.stream for made in engine.generations] == [False, False]
    for row in rows_of(session):
        check_given(row)
        check_top(row)
        check_routed(row)


def test_whole_replies_of_the_chat_path_have_them(engine: ScriptedEngine, running: Running) -> None:
    engine.say("hello world")
    session = running[1]["chat"].session(sampling=EVERYTHING)
    session.ask("q")
    (row,) = rows_of(session)
    check_given(row)
    check_top(row)
    check_routed(row)


def test_a_prompt_without_messages_has_what_comes_with_ids(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session(sampling=EVERYTHING)
    answer = session.client.completions.create(model="policy", prompt="hello", max_tokens=5, logprobs=1)
    assert len(answer.choices[0].logprobs.top_logprobs[0]) == 1
    (row,) = rows_of(session)
    check_given(row)
    check_routed(row)
    assert row.details is not None and row.details.top_token_ids is None


def test_every_choice_has_its_own(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say("hello", "hello world")
    session = token_service.session(sampling=EVERYTHING)
    session.ask("q", n=2)
    rows = rows_of(session)
    assert len(rows) == 2
    for row in rows:
        check_given(row)
        check_top(row)
        check_routed(row)


@pytest.mark.parametrize("asked", [0, 1, 4])
def test_a_harness_sees_as_many_alternatives_as_it_asked_for(
    engine: ScriptedEngine, token_service: RunningService, asked: int
) -> None:
    """None where none are asked for, though vLLM then tells the sampled token as its own alternative."""
    engine.say("hello world")
    session = token_service.session(sampling={"top_logprobs": TOP})
    content = session.ask("q", logprobs=True, top_logprobs=asked).choices[0].logprobs.content
    assert {len(entry.top_logprobs) for entry in content} == {asked}
    (row,) = rows_of(session)
    check_top(row)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_without_alternatives_have_none_in_either_dialect(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    engine.say("hello world", "hello world")
    session = service.session()
    asked = session.ask("q", logprobs=True, stream=stream)
    chunks = list(asked) if stream else [asked]
    entries = [entry for chunk in chunks for each in chunk.choices if each.logprobs for entry in each.logprobs.content]
    assert entries and [entry.top_logprobs for entry in entries] == [[]] * len(entries)
    include = ["message.output_text.logprobs"]
    response = session.client.responses.create(model="policy", input="q", include=include, stream=stream)
    told = next(event.response for event in response if event.type == "response.completed") if stream else response
    shown = told.output[0].content[0].logprobs
    assert shown and [entry.top_logprobs for entry in shown] == [[]] * len(shown)


def test_what_nobody_asks_for_is_neither_asked_of_the_engine_nor_kept(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    session.ask("q")
    (row,) = rows_of(session)
    assert row.details is None
    assert engine.last.sampling["logprobs"] == 0 and "prompt_logprobs" not in engine.last.sampling


def test_none_of_it_is_sent_to_the_engine_as_a_parameter(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session(sampling={"top_logprobs": 0, "routed_experts": False, "temperature": 0.5})
    session.ask("q")
    assert engine.last.sampling["temperature"] == 0.5
    assert "routed_experts" not in {**engine.last.body, **engine.last.sampling}


def test_an_engine_that_does_not_tell_changes_nothing(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.routes = False
    session = token_service.session(sampling={"routed_experts": True})
    tool_turns(session, engine)
    (row,) = rows_of(session)
    assert row.details is None


def test_an_answer_that_breaks_off_leaves_a_gap_and_no_more(engine: ScriptedEngine, token_service: RunningService) -> None:
    """The experts come with the end of an answer. A later call asks for all again."""
    engine.say(Say("hello world", break_after=1))
    session = token_service.session(sampling={"routed_experts": True})
    with pytest.raises(Exception, match="broke off"):
        streamed_text(session.ask("q", stream=True))
    tool_turns(session, engine)
    assert [made.sampling.get("routed_experts_prompt_start", 0) for made in engine.generations][:2] == [0, 0]
    check_routed(max(rows_of(session), key=lambda row: len(row.token_ids)))


def test_a_trainers_lease_has_them(engine: ScriptedEngine, token_service: RunningService) -> None:
    from tests.support.service.running_service import TRAINER

    session = token_service.session(sampling=EVERYTHING, group_id="details")
    tool_turns(session, engine)
    session.close(reward=1.0)
    with TrainerClient(token_service.url, TRAINER) as client:
        batch = client.lease(max_groups=1, wait_seconds=10)
        assert batch is not None
        with batch:
            (row,) = batch.rows
            check_routed(row)
            data = batch.padded()
    assert set(data.logprob_modes[data.loss_mask]) == {LOGPROB_MODES.index("raw")}
    assert data.routed_experts is not None
    np.testing.assert_array_equal(data.routed_experts[0], row.details.routed_experts if row.details else 0)


# Settings


@pytest.mark.parametrize("name", ["prompt_logprobs", "routed_experts", "top_logprobs"])
def test_a_service_can_keep_them_for_all_sessions_and_a_session_can_decline(
    engine: ScriptedEngine, own_redis: str, name: str
) -> None:
    setting: Any = TOP if name == "top_logprobs" else True
    with RunningService(engine.url, own_redis, keep={name: setting}) as service:
        kept, declined = service.session(), service.session(sampling={name: type(setting)(0)})
        for session in (kept, declined):
            session.ask("q")
        (row,), (bare,) = rows_of(kept), rows_of(declined)
    assert row.details is not None and bare.details is None


@pytest.fixture
def own_redis() -> Iterator[str]:
    with running_redis() as redis:
        yield redis.url


@pytest.mark.parametrize("wrong", [{"top_logprobs": -1}, {"top_logprobs": 129}, {"prompt_logprobs": "perhaps"}])
def test_a_session_that_asks_for_nonsense_is_refused(token_service: RunningService, wrong: dict[str, Any]) -> None:
    answer = token_service.request("POST", "/sessions", json={"sampling": wrong})
    assert answer.status_code == 400, answer.text
    assert next(iter(wrong)) in answer.text


def test_a_session_says_what_it_asked_for(token_service: RunningService) -> None:
    session = token_service.session(sampling={**EVERYTHING, "temperature": 0.5})
    answer = token_service.request("GET", f"/sessions/{session.session_id}").json()
    assert answer["sampling"] == {**EVERYTHING, "temperature": 0.5}


# What the logprobs are


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_mode_is_the_one_that_the_engines_workers_tell(own_redis: str, mode: str) -> None:
    with ScriptedEngine() as engine:
        engine.weights.loaded["logprob_mode"] = f"{mode}_logprobs"
        # What the operator says is of no account where the engine speaks for itself.
        with RunningService(engine.url, own_redis, engine_logprob_modes={"": "raw_logits"}) as service:
            session = service.session()
            session.ask("q")
            (call,) = session.calls
            (row,) = rows_of(session)
    assert [name for name, *_ in call["logprob_modes"]] == [span.mode for span in row.logprob_modes] == [mode]


@pytest.mark.parametrize(
    ("said", "expected"), [({}, "unknown"), ({"": "processed_logprobs"}, "processed"), ({"other": "raw_logits"}, "unknown")]
)
def test_an_engine_that_does_not_tell_has_the_mode_its_operator_says(own_redis: str, said: Any, expected: str) -> None:
    with ScriptedEngine(updatable=False) as engine, RunningService(engine.url, own_redis, engine_logprob_modes=said) as service:
        session = service.session()
        session.ask("q")
        (row,) = rows_of(session)
    assert [span.mode for span in row.logprob_modes] == [expected]


@contextmanager
def said_of_its_logprobs(redis_url: str, answer: Any) -> Iterator[tuple[ScriptedEngine, Session]]:
    """A session at an engine whose workers say this of the mode of their logprobs."""
    with ScriptedEngine() as engine:
        engine.weights.loaded["logprob_mode"] = answer
        with RunningService(engine.url, redis_url) as service:
            yield engine, service.session()


@pytest.mark.parametrize("answer", [None, "", 3, ["raw_logprobs"]])
def test_workers_that_tell_no_mode_leave_it_unknown(own_redis: str, answer: Any) -> None:
    with said_of_its_logprobs(own_redis, answer) as (_, session):
        session.ask("q")
        (row,) = rows_of(session)
    assert [span.mode for span in row.logprob_modes] == ["unknown"]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_calls_of_an_engine_that_reports_logits_are_answered_and_never_trained(own_redis: str, mode: str) -> None:
    with said_of_its_logprobs(own_redis, mode) as (engine, session):
        engine.say("hello world")
        assert session.ask("q").choices[0].message.content == "hello world"
        rows, accounting = session.trajectories()
    assert rows == [] and accounting["exported_tokens"] == 0
    assert [item["reason"] for item in accounting["quarantined"]] == ["logits_for_logprobs"]


def modes_of(call: Any) -> list[str]:
    return [mode for mode, *_ in call["logprob_modes"]]


@pytest.mark.case(64)
def test_a_grammar_that_the_engine_adds_by_itself_masks(engine: ScriptedEngine, token_service: RunningService) -> None:
    """As vLLM does for some tool parsers, whatever the request says: only the rendering tells."""
    engine.adds = {"structured_outputs": {"structural_tag": "{}", "regex": None, "_backend_was_auto": False}}
    session = token_service.session()
    session.ask("q", tools=TOOLS)
    engine.adds = {}
    session.ask("q", tools=TOOLS)
    masked, raw = session.calls
    assert (modes_of(masked), modes_of(raw)) == (["masked"], ["raw"])
    assert masked["logprob_modes"] == [["masked", 0, len(masked["completion_ids"])]]
    assert masked["sampling"]["structured_outputs"] == {"structural_tag": "{}"}
    assert "structured_outputs" not in raw["sampling"]


def test_a_parameter_that_nobody_knows_is_noted_and_no_longer_raw(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    engine.adds = {"new_mask": 0}
    session = token_service.session()
    session.ask("q")
    (call,) = session.calls
    assert modes_of(call) == ["unknown"] and call["sampling"]["new_mask"] == 0


def test_a_long_grammar_is_noted_by_its_digest(engine: ScriptedEngine, token_service: RunningService) -> None:
    """The tags of many tools would be stored with every call."""
    engine.adds = {"structured_outputs": {"structural_tag": "x" * 50_000}}
    session = token_service.session()
    session.ask("q")
    (noted,) = [call["sampling"]["structured_outputs"] for call in session.calls]
    assert noted.keys() == {"bytes", "sha256"} and noted["bytes"] > 50_000


FORCED = {"type": "function", "function": {"name": "lookup"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
CHAT_ONLY: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "nothing": ({}, "raw", set()),
    "a bias": ({"logit_bias": {"7": 1}}, "raw", {"logit_bias"}),
    "no bias": ({"logit_bias": {}, "presence_penalty": 0, "response_format": {"type": "text"}}, "raw", set()),
    "allowed ids": ({"extra_body": {"allowed_token_ids": [7, 8]}}, "raw", {"allowed_token_ids"}),
    "bad words": ({"extra_body": {"bad_words": ["x"]}}, "raw", {"bad_words"}),
    "a schema": ({"response_format": SCHEMA}, "masked", {"response_format"}),
    "a regex": ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "masked", {"structured_outputs"}),
    "a forced tool": ({"tools": TOOLS, "tool_choice": FORCED}, "masked", {"tool_choice"}),
    "some forced tool": ({"tools": TOOLS, "tool_choice": "required"}, "masked", {"tool_choice"}),
    "a strict tool": ({"tools": STRICT}, "masked", set()),
    "a tool": ({"tools": TOOLS}, "unknown", set()),
    "tools not to be used": ({"tools": TOOLS, "tool_choice": "none"}, "raw", set()),
    "something new": ({"extra_body": {"new_mask": {"a": 1}}}, "unknown", {"new_mask"}),
}


@pytest.mark.case(64)
def test_a_chat_engine_is_judged_by_all_that_it_was_sent(running: Running) -> None:
    """It does not say what it makes of it: tools may become a grammar."""
    engine, services = running[0].reset(), running[1]
    session = services["chat"].session()
    for fields, _, _ in CHAT_ONLY.values():
        session.ask("q", **fields)
    told = [(modes_of(call), call["sampling"].keys() - FIXED) for call in session.calls]
    assert told == [([mode], noted) for _, mode, noted in CHAT_ONLY.values()]
    assert len(engine.generations) == len(CHAT_ONLY)


FIXED = {"temperature", "top_p", "top_k", "seed", "max_tokens", "stop"}


@pytest.mark.case(64)
def test_a_lease_can_leave_a_mode_out_and_the_sum_still_holds(engine: ScriptedEngine, own_redis: str) -> None:
    """The masked turn is context of the raw one, not trained; given back, the group is whole again for who wants all of it."""
    from tests.support.service.running_service import TRAINER

    with RunningService(engine.url, own_redis) as service:
        session = service.session(group_id="g")
        engine.adds = {"structured_outputs": {"structural_tag": "{}"}}
        engine.say(A_CALL, "hello world")
        asked = [turn("user", "q")]
        message = session.ask(asked, tools=TOOLS).choices[0].message.model_dump(exclude_none=True)
        engine.adds = {}
        session.ask([*asked, message, tool_result(message, "sunny")], tools=TOOLS)
        first, second = session.calls
        session.close(reward=1.0)
        with TrainerClient(service.url, TRAINER) as client:
            for wanted, trained, kept in (
                (["raw"], [second], ["masked"]),
                (["masked"], [first], ["raw"]),
                (["processed"], [], ["masked", "raw"]),
                (None, [first, second], []),
            ):
                batch = client.lease(logprob_modes=wanted, wait_seconds=10)
                assert batch is not None
                (leased,) = batch.groups[0].sessions
                assert [item.reason for item in leased.quarantined] == ["logprob_mode"] * len(kept) and leased.complete
                assert leased.exported_tokens == sum(len(call["completion_ids"]) for call in trained)
                assert sum(int(row.loss_mask.sum()) for row in batch.rows) == leased.exported_tokens
                assert [mode for row in batch.rows for mode in sorted(span.mode for span in row.logprob_modes)] == sorted(
                    mode for call in trained for mode in modes_of(call)
                )
                batch.nack()
        refused = service.request("POST", "/batches/lease", json={"logprob_modes": ["grammar"]}, token=TRAINER)
    assert refused.status_code == 400 and "logprob_modes" in refused.text


def test_a_service_can_train_on_one_mode_only(engine: ScriptedEngine, own_redis: str) -> None:
    with RunningService(engine.url, own_redis, train_logprob_modes=["processed"]) as service:
        session = service.session()
        session.ask("q")
        rows, accounting = session.trajectories()
    assert rows == []
    assert [item["reason"] for item in accounting["quarantined"]] == ["logprob_mode"]


def test_logits_cannot_be_asked_for() -> None:
    with pytest.raises(ValidationError):
        Settings(train_logprob_modes=["logits"])


# Reading what an engine says


def packed(table: Any) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, table)
        return base64.b64encode(buffer.getvalue()).decode()


def test_the_most_probable_come_first_and_each_once() -> None:
    """vLLM tells the sampled token first, and it may be among the most probable."""
    tops = [[(5, -3.0), (6, -1.0), (7, -2.0)], [(8, -0.5), (9, -2.0), (4, -2.5)], [(3, -1.0), (3, -1.0)]]
    details = read_details(WantedDetails(top_logprobs=2), [1], 3, tops=tops)
    assert details is not None and details.top_token_ids is not None and details.top_logprobs is not None
    assert details.top_token_ids.tolist() == [[6, 7], [8, 9], [3, -1]]
    assert details.top_logprobs[:2].tolist() == [[-1.0, -2.0], [-0.5, -2.0]] and np.isnan(details.top_logprobs[2, 1])


@pytest.mark.parametrize(
    "text",
    [
        "not base64",
        base64.b64encode(b"not an array").decode(),
        packed(np.zeros((2, 1, 1), np.uint8)),
        packed(np.zeros((4, 1), np.uint8)),
        packed(np.zeros((4, 1, 1), np.float32)),
        packed(np.full((4, 1, 1), 2**15, np.int32)),
        packed(np.full((4, 1, 1), -1, np.int32)),
    ],
)
def test_experts_that_are_not_of_these_tokens_are_left_out(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_details(WantedDetails(routed_experts=True), [1, 2, 3], 2, routed_experts=text) is None
    assert "left out" in caplog.text


@pytest.mark.parametrize(("most", "dtype"), [(255, "uint8"), (256, "uint16")])
def test_experts_are_kept_as_small_as_they_are(most: int, dtype: str) -> None:
    details = read_details(
        WantedDetails(routed_experts=True), [1], 2, routed_experts=packed(np.full((2, 1, 1), most, np.int32))
    )
    assert details is not None and details.routed_experts is not None
    assert details.routed_experts.dtype == dtype


def test_prompt_logprobs_of_another_prompt_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    told = [None, {"2": PromptLogprob(-1.0)}]
    assert read_details(WantedDetails(prompt_logprobs=True), [1, 2, 3], 1, prompt_logprobs=told) is None
    assert "left out" in caplog.text


def test_what_comes_unasked_is_not_kept() -> None:
    assert (
        read_details(
            WantedDetails(), [1], 1, tops=[[(1, -1.0)]], prompt_logprobs=[None], routed_experts=packed(np.zeros((1, 1, 1)))
        )
        is None
    )
