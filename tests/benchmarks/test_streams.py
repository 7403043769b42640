"""The paced engine says what vLLM's routes say, one token at a time, and the load reports what it saw of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from benchmarks.load import CallsFailed
from benchmarks.paced_engine import REFUSALS, Behavior, Refusal, behave, counted, derender, frame_events, paced_engine
from benchmarks.paced_load import Plan, Seen, open_streams
from benchmarks.processes import connection_to, request
from benchmarks.replies import Size, answers, plugin_steps
from benchmarks.streams import figures, tables
from proxy.engine.in_vllm.frames import DoneFrame, EndFrame, FrameDecoder, PieceFrame, PlanFrame, read_ids

ASKED = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with paced_engine(side="load") as url:
        yield url


def plan(engine: str, streams: int, path: str = "/v1/chat/completions") -> Plan:
    return Plan(engine, engine, [(path, "")], '{"n":', "}", 0, streams, 1.0, 0.01, None)


def unchunk(step: bytes) -> bytes:
    """The events in what goes over the wire for one token."""
    content = b""
    rest = step.partition(b"\r\n\r\n")[2] if step.startswith(b"HTTP") else step
    while rest and not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return content


@pytest.mark.parametrize("name", ["chat.sse", "generate.sse"])
def test_each_step_of_a_stream_carries_one_token_and_all_steps_are_the_whole_stream(name: str) -> None:
    stream = answers(Size("five", 10, 5), stream=True)[name]
    steps = frame_events(stream, 5)
    assert [step.count(b'"token_ids":[') for step in steps] == [1] * 5
    assert b"".join(map(unchunk, steps)) == stream
    assert steps[0].startswith(b"HTTP/1.1 200") and steps[-1].endswith(b"0\r\n\r\n")


def test_the_plugin_s_frames_are_read_as_the_service_reads_them_one_token_at_a_time() -> None:
    size = Size("five", 10, 5)
    steps = plugin_steps(size)
    assert b"".join(steps) == answers(size, stream=True)["sample.frames"]
    frames = [FrameDecoder().feed(step) for step in steps]
    assert [[type(frame) for frame in step] for step in frames] == [
        [PlanFrame, PieceFrame],
        [PieceFrame],
        [PieceFrame],
        [PieceFrame],
        [PieceFrame, EndFrame, DoneFrame],
    ]
    (plan,) = (frame for frame in frames[0] if isinstance(frame, PlanFrame))
    assert len(read_ids(plan.tail)) == plan.shared == 10
    whole = FrameDecoder().feed(answers(size, stream=False)["sample.frames"])
    assert [type(frame) for frame in whole] == [PlanFrame, PieceFrame, EndFrame, DoneFrame]


def test_derender_returns_a_word_for_each_id_of_a_step_or_of_the_whole_reply() -> None:
    step = derender(json.dumps({"generate_chunk": {"choices": [{"token_ids": [1, 2]}]}, "stream_state": None}).encode())
    assert step["chunk"]["choices"][0]["delta"]["content"] == "word word "
    whole = derender(json.dumps({"generate_response": {"choices": [{"token_ids": [1, 2, 3]}]}}).encode())
    assert whole["choices"][0]["message"]["content"] == "word word word "


def test_every_stream_of_a_wave_is_seen_to_its_end_and_the_engine_counts_what_it_was_asked(engine: str) -> None:
    behave(engine, Behavior(prompt=10, sampled=6, pace_ms=10))
    seen = open_streams(plan(engine, streams=7))
    assert len(seen.first_byte_ms) == 7
    for first, text, last in zip(seen.first_byte_ms, seen.first_text_ms, seen.last_byte_ms, strict=True):
        assert 0 < first <= text < last
    told = counted(engine)
    assert (told.replies, told.requests, told.tokens) == (7, 7, 42)
    assert told.bytes_in > 7 * len('{"n":0}')


def test_a_wave_is_no_figure_when_a_stream_is_refused_or_cut(engine: str) -> None:
    refused: tuple[tuple[Refusal, str], ...] = (("503", "answered 503"), ("cut after the head", "ended before its end"))
    for refusal, why in refused:
        behave(engine, Behavior(10, 6, 10, refusal))
        with pytest.raises(CallsFailed, match=f"3 of 3 streams failed: .*{why}"):
            open_streams(plan(engine, streams=3))
        assert counted(engine).tokens == 0


def test_an_engine_that_refuses_before_the_body_does_not_wait_for_it(engine: str) -> None:
    assert "503 before the body" in REFUSALS
    behave(engine, Behavior(10, 6, 10, "503 before the body"))
    connection = connection_to(engine)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", "1000")
    connection.endheaders()  # and no body
    assert connection.getresponse().status == 503
    connection.close()


def test_what_does_not_sample_is_answered_while_sampling_is_refused(engine: str) -> None:
    behave(engine, Behavior(10, 6, 10, "503"))
    assert len(request(engine, "POST", "/v1/chat/completions/render", ASKED)["token_ids"]) == 10


def test_figures_are_relative_to_the_engine_and_there_is_no_cost_per_token_without_flow() -> None:
    flowing = Seen([10.0, 20.0], [11.0, 21.0], [100.0, 100.0], flow_seconds=2.0, flow_tokens=1_000, flow_cpu_seconds=0.025)
    found = figures(flowing, cpu_seconds=0.1)
    assert (found["cpu_us_per_token"], found["cpu_ms_per_reply"]) == (25, 50)
    assert found["first_byte_ms"]["p50"] == 15
    starting = figures(Seen([90.0], [91.0], [900.0], 0.0, 0, 0.0), cpu_seconds=0.1)
    assert "cpu_us_per_token" not in starting

    cells = [
        {"contender": "engine", "title": "a wave", **figures(Seen([5.0, 5.0], [5.0, 5.0], [90.0, 90.0], 0.0, 0, 0.0), None)},
        {"contender": "verbatim", "title": "a wave", **found, "engine_bytes": 4_000.0, "engine_requests": 1.0},
        {"contender": "litellm", "title": "a wave", "failed": "answered 500"},
    ]
    (grid,) = tables({"waves": cells, "refusals": []})
    rows = {row[0]: row[1:] for row in grid.rows}
    assert rows["**Verbatim**, chat path, Redis"] == ("15", "19.9", "10", "14.9", "11", "10", "25", "50", "1", "4,000")
    assert rows["the static engine itself"][2:4] == ("-", "-")
    assert set(rows["LiteLLM proxy"]) == {"-"}
