"""SGLang's `/generate` through the real service, against answers in the shapes of its source (see shaped_sglang.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.engine.apis import sglang
from tests.support.engine.local_format import QWEN3, require_renderers
from tests.support.engine.shaped_sglang import Shaped, ShapedSglang
from tests.support.engine.template_families import FAMILIES
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService, Session, streamed_text, wait_until

require_renderers()

FAMILY = FAMILIES["qwen3"]
Opened = tuple[ShapedSglang, RunningService]


@contextmanager
def both(qwen3_format: Path, kind: dict[str, Any]) -> Iterator[Opened]:
    """An SGLang and a service with a store of its own: one store has one line of weight versions."""
    with (
        ShapedSglang(**kind) as engine,
        running_redis() as redis,
        RunningService(
            engine.url, redis.url, engine_api="sglang", renderer=str(qwen3_format), renderer_options=QWEN3
        ) as service,
    ):
        yield engine, service


@pytest.fixture
def opened(qwen3_format: Path) -> Iterator[Callable[..., Opened]]:
    """Makes them for one test, which may change the engine's weights."""
    with ExitStack() as stack:
        yield lambda **kind: stack.enter_context(both(qwen3_format, kind))


@pytest.fixture(scope="module")
def kept(qwen3_format: Path) -> Iterator[Callable[..., Opened]]:
    """Makes one of a kind for all tests, none of which changes its weights."""
    made: dict[str, Opened] = {}
    with ExitStack() as stack:

        def open_both(**kind: Any) -> Opened:
            name = str(kind)
            if name not in made:
                made[name] = stack.enter_context(both(qwen3_format, kind))
            engine, service = made[name]
            return engine.reset(), service

        yield open_both


def ids(text: str) -> list[int]:
    return [*FAMILY.encode(text), FAMILY.end_id]


def ask(session: Session, stream: bool, **fields: Any) -> str:
    if stream:
        return streamed_text(session.ask("q", stream=True, **fields))[0]
    return session.ask("q", **fields).choices[0].message.content or ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "finish_reason", "stop_reason", "text"),
    [
        ({"type": "length", "length": 3}, "length", None, "the cat sunny"),
        ({"type": "stop", "matched": "sun"}, "stop", "sun", "the cat "),
        ({"type": "stop", "matched": FAMILY.id_of("<|endoftext|>")}, "stop", FAMILY.id_of("<|endoftext|>"), "the cat"),
        ({"type": "stop", "matched": [1, 2]}, "stop", None, "the cat"),
    ],
    ids=["length", "text", "other token", "tokens"],
)
def test_why_a_reply_ended_is_told_in_our_words(
    kept: Callable[..., Opened], finish: dict[str, Any], finish_reason: str, stop_reason: Any, text: str, stream: bool
) -> None:
    engine, service = kept()
    said = FAMILY.encode("the cat sunny")
    stopped = finish["type"] == "stop" and not isinstance(finish["matched"], str)
    engine.shape(Shaped([*FAMILY.encode("the cat"), FAMILY.id_of("<|endoftext|>")] if stopped else said, finish))
    session = service.session()
    assert ask(session, stream).strip() == text.strip()
    (call,) = session.calls
    assert (call["finish_reason"], call["stop_reason"]) == (finish_reason, stop_reason)


def test_spans_of_an_update_in_the_middle_are_kept(kept: Callable[..., Opened]) -> None:
    engine, service = kept(label="4")
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 5}]
    engine.shape(Shaped(FAMILY.encode("hello world the cat bird")[:5], {"type": "length", "length": 5}, spans))
    session = service.session()
    ask(session, False)
    assert session.calls[0]["weight_versions"] == [[4, 0, 2], [5, 2, 5]]


@pytest.mark.parametrize(
    ("kind", "versions", "label_at_end"),
    [
        ({"label": "4"}, [{"version": "4", "start": 0, "end": 2}], None),
        ({"label": "4"}, [{"version": "4", "start": 0, "end": 2}, {"version": "default", "start": 2, "end": 4}], None),
        ({"label": "4", "newer": False}, None, "5"),
        ({"label": "4", "newer": False}, None, "default"),
    ],
    ids=["a gap", "no number", "changed meanwhile", "no number any more"],
)
def test_a_token_whose_weights_are_not_known_is_never_trained(
    opened: Callable[..., Opened], kind: dict[str, Any], versions: Any, label_at_end: str | None
) -> None:
    engine, service = opened(**kind)
    engine.label_at_end = label_at_end
    engine.shape(
        Shaped(FAMILY.encode("hello world")[:4] + FAMILY.encode("the cat")[:2], {"type": "length", "length": 4}, versions)
    )
    session = service.session()
    ask(session, False)
    assert session.calls[0]["weight_versions"] == []
    rows, accounting = session.trajectories()
    assert rows == []
    assert accounting["quarantined"]


def test_an_engine_that_was_just_started_is_given_version_0(opened: Callable[..., Opened]) -> None:
    engine, service = opened(label="default")
    service.await_ready()
    assert engine.label == "0"


def test_what_has_a_say_is_said_in_sglangs_words(kept: Callable[..., Opened]) -> None:
    engine, service = kept()
    engine.shape(Shaped(ids("hello")))
    session = service.session()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    session.ask(
        "q",
        temperature=0.5,
        seed=7,
        max_tokens=9,
        stop=["x"],
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        extra_body={"min_tokens": 2, "top_k": 5},
    )
    params = engine.bodies[0]["sampling_params"]
    assert params.pop("stop_token_ids")[0] == FAMILY.end_id
    assert params == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 5,
        "sampling_seed": 7,
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop": ["x"],
        "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        "skip_special_tokens": False,
        "stream_interval": 16,
    }
    assert session.calls[0]["sampling"]["temperature"] == 0.5


def test_an_engine_that_does_not_tell_its_window_samples_to_its_end(kept: Callable[..., Opened]) -> None:
    engine, service = kept(window=None)
    engine.shape(Shaped(ids("hello")))
    service.session().ask("q")
    assert engine.bodies[0]["sampling_params"]["max_new_tokens"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_for_the_engine_is_refused_in_the_harnesss_words(kept: Callable[..., Opened], stream: bool) -> None:
    """The service does not know the window here; the engine does."""
    engine, service = kept(window=None)
    with pytest.raises(openai.BadRequestError) as raised:
        service.session().ask("cat " * 9000, stream=stream)
    assert raised.value.code == "context_length_exceeded"
    assert len(engine.bodies) == 1


def test_an_engine_that_shortens_the_prompt_is_an_error(kept: Callable[..., Opened]) -> None:
    engine, service = kept(newer=False)
    engine.shape(Shaped(ids("hello"), prompt_tokens=2))
    session = service.session()
    with pytest.raises(openai.InternalServerError, match="sampled after 2 of"):
        session.ask("q")
    assert session.calls == []


def test_new_weights_are_loaded_labelled_and_served(opened: Callable[..., Opened]) -> None:
    engine, service = opened(label="default")
    for version, mode in ((1, "keep"), (2, "abort"), (3, "wait")):
        engine.received.clear()
        pushed = service.request("POST", "/weights", json={"version": version, "path": f"/models/{version}", "mode": mode})
        assert pushed.json()["applied"], pushed.text
        assert (engine.label, engine.model_path, engine.paused) == (str(version), f"/models/{version}", False)
        sent = {request.path: request.body for request in engine.received}
        assert sent["/update_weights_from_disk"]["flush_cache"] is True
        paused = sent.get("/pause_generation")
        assert paused == {"keep": {"mode": "retract"}, "abort": {"mode": "abort"}, "wait": None}[mode]
    engine.shape(Shaped(ids("hello")))
    session = service.session()
    session.ask("q")
    assert session.calls[0]["weight_versions"] == [[3, 0, 2]]


def test_a_checkpoint_that_sglang_does_not_find_leaves_the_old_weights_serving(opened: Callable[..., Opened]) -> None:
    engine, service = opened(label="default")
    engine.refuses = "Failed to get model config: no such folder."
    pushed = service.request("POST", "/weights", json={"version": 1, "path": "/models/none"})
    assert not pushed.json()["applied"]
    assert "no such folder" in pushed.json()["error"]
    assert (engine.label, engine.paused) == ("0", False)
    assert service.request("GET", "/readyz").status_code == 200


def test_a_checkpoint_that_was_rolled_back_leaves_the_engine_out(opened: Callable[..., Opened]) -> None:
    """Every worker rolls back for itself: whether all hold the same afterwards, SGLang does not say."""
    engine, service = opened(label="default")
    engine.refuses = "Failed to update weights: torn.\nRolling back to original weights."
    pushed = service.request("POST", "/weights", json={"version": 1, "path": "/models/torn"})
    assert not pushed.json()["applied"]
    assert engine.paused
    assert engine.label == "torn"
    assert service.request("GET", "/readyz").status_code == 503


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_weights_that_are_in_while_the_cache_was_not_flushed_are_labelled_once_it_is(
    opened: Callable[..., Opened], mode: str
) -> None:
    """It was taken for a refusal that had touched nothing: the new weights served under the old version."""
    engine, service = opened(label="default")
    engine.keeps_cache = 3
    pushed = service.request("POST", "/weights", json={"version": 1, "path": "/models/1", "mode": mode}).json()
    assert pushed["applied"], pushed
    assert (engine.holds, engine.label, engine.paused, engine.keeps_cache) == ("/models/1", "1", False, 0)
    steps = [request.path for request in engine.received if request.path in ("/abort_request", "/flush_cache")]
    assert steps == ["/abort_request", "/flush_cache"] * 3
    labels = [request.body["new_version"] for request in engine.received if request.path == "/update_weight_version"]
    assert labels[-2:] == ["torn", "1"]
    assert service.request("GET", "/readyz").status_code == 200


def test_an_engine_that_cannot_flush_its_cache_is_left_out(
    opened: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "PROBE_SECONDS", 1.0)
    engine, service = opened(label="default")
    engine.keeps_cache = 10**6
    pushed = service.request("POST", "/weights", json={"version": 1, "path": "/models/1"}).json()
    assert not pushed["applied"] and "cannot flush its cache of the old ones" in pushed["error"]
    assert (engine.label, engine.paused) == ("torn", True)
    assert service.request("GET", "/readyz").status_code == 503


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_an_engine_that_rolled_back_is_given_the_current_weights_before_it_serves(
    opened: Callable[..., Opened], often_visited: None, mode: str
) -> None:
    """It calls what it fell back to by the old version, and under `wait` it is not even paused."""
    engine, service = opened(label="default")
    assert service.request("POST", "/weights", json={"version": 1, "path": "/models/1"}).json()["applied"]
    engine.refuses = "Failed to update weights: torn.\nRolling back to original weights."
    engine.received.clear()
    pushed = service.request("POST", "/weights", json={"version": 2, "path": "/models/torn", "mode": mode})
    assert not pushed.json()["applied"]
    service.await_ready()
    loads = [request.body["model_path"] for request in engine.received if request.path == "/update_weights_from_disk"]
    assert loads == ["/models/torn", "/models/1"]
    assert (engine.label, engine.paused) == ("1", False)


def test_a_delta_is_refused_before_it_touches_the_weights(opened: Callable[..., Opened]) -> None:
    engine, service = opened(label="default")
    pushed = service.request("POST", "/weights", json={"version": 1, "path": "/models/1", "kind": "delta"}).json()
    assert not pushed["applied"] and "no deltas" in pushed["error"]
    assert (engine.label, engine.paused, engine.holds) == ("0", False, "/models/first")


def test_an_adapter_is_not_exchanged(opened: Callable[..., Opened]) -> None:
    _, service = opened(label="default")
    pushed = service.request("POST", "/weights", json={"version": 1, "path": "/models/a", "kind": "lora"})
    assert (pushed.status_code, pushed.json()["error"]["param"]) == (400, "model")


def test_an_engine_that_does_not_tell_of_its_pause_is_resumed_when_it_is_first_met(
    opened: Callable[..., Opened], often_visited: None
) -> None:
    """0.5.5 has no /ready: a push of a process that died may have left it paused, and its calls would hang."""
    engine, service = opened(newer=False, paused=True)
    assert service.request("GET", "/readyz").status_code == 200
    assert not engine.paused
    engine.received.clear()
    wait_until(lambda: len(engine.paths()) > 20, 60, "it was looked at again")
    assert "/continue_generation" not in engine.paths(), "once is enough while it serves"


def test_an_engine_that_does_not_tell_of_its_pause_is_resumed_when_it_returns(
    opened: Callable[..., Opened], often_visited: None
) -> None:
    """The push ends with the new weights loaded and labelled, and nobody hears the last step."""
    engine, service = opened(newer=False, label="default")
    engine.stays_paused = 1
    pushed = service.request("POST", "/weights", json={"version": 1, "path": "/models/1"}).json()
    assert pushed["applied"] and "not now" in next(iter(pushed["replicas"].values()))["error"]
    service.await_ready()
    assert (engine.label, engine.paused) == ("1", False)
    assert engine.paths().count("/update_weights_from_disk") == 1
