"""An engine that is another one in the middle of a session, and services that see one engine differently: no token goes where it means
something else, and every sampled one is in a row or accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from proxy.engine.apis.vllm_reply import GENERATE
from tests.support.engine.scripted_engine import Say, ScriptedEngine, logprobs_of
from tests.support.engine.template_families import FAMILIES
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, wait_until

pytestmark = pytest.mark.usefixtures("often_visited")

QUESTION = {"role": "user", "content": "Tell me of the fish."}
MORE = [{"role": "user", "content": text} for text in ("And the cat?", "And the dog?")]


@pytest.fixture
def running(redis_server: RedisServer) -> Iterator[ExitStack]:
    redis_server.flushall()
    with ExitStack() as running:
        yield running


def ask(service: RunningService, session: Session, messages: list[Any], model: str = "policy") -> dict[str, Any]:
    """The reply of that service, which may be another than the session's."""
    url = session.base_url.replace(session.base_url.partition("/s/")[0], service.url)
    http = httpx.Client(verify=False, timeout=120)
    with openai.OpenAI(base_url=url, api_key=session.api_key, max_retries=0, http_client=http) as client:
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16)
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message


def wait_for(service: RunningService, policy: str = "", **wanted: Any) -> None:
    """Until the policy's one replica is what is wanted, and serves unless another status is."""
    wanted = {"status": "serving", **wanted}

    def is_there() -> bool:
        replicas = service.request("GET", "/engines").json()["replicas"]
        return any(all(each[name] == value for name, value in wanted.items()) for each in replicas if each["policy"] == policy)

    wait_until(is_there, 120, f"a replica of {policy!r} with {wanted}")


def check_rows(service: RunningService, session: Session, *engines: ScriptedEngine) -> list[dict[str, Any]]:
    """The rows. Each call has the ids that an engine was given and has sampled, a row has those of its calls, none is left out."""
    calls = service.request("GET", f"/sessions/{session.session_id}/calls").json()["calls"]
    answer = service.request("GET", f"/sessions/{session.session_id}/trajectories").json()
    made = [(each.prompt_ids, each.sampled[0]) for engine in engines for each in engine.generations]
    for call in calls:
        assert (call["prompt_ids"], call["completion_ids"]) in made
        assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])
    known = {call["call_id"]: call["prompt_ids"] + call["completion_ids"] for call in calls}
    for row in answer["trajectories"]:
        for ids in (known[call_id] for call_id in row["call_ids"]):
            assert row["token_ids"][: len(ids)] == ids
    assert answer["accounting"]["quarantined"] == []
    assert sum(sum(row["loss_mask"]) for row in answer["trajectories"]) == sum(len(call["completion_ids"]) for call in calls)
    rows: list[dict[str, Any]] = answer["trajectories"]
    return rows


# An engine that is another one.


@pytest.mark.case(13)
@pytest.mark.parametrize("service_stays", [True, False])
@pytest.mark.parametrize(("before", "after"), [("glm4", "qwen3"), ("gemma", "mistral"), ("qwen3", "qwen3")])
def test_a_model_with_another_tokenizer_is_not_given_the_ids_of_the_one_before(
    running: ExitStack, redis_server: RedisServer, before: str, after: str, service_stays: bool
) -> None:
    """The engine is started anew, under the same name. The session went on in the same row, after ids that mean something else to the
    new model. The same model goes on in the row."""
    family = FAMILIES[before]
    first, second = running.enter_context(ScriptedEngine(before)), ScriptedEngine(after)
    # In other ids than those of its text, which no rendering has.
    first.say(Say(token_ids=[*family.encode("fish"), *family.encode("ing"), family.end_id]))
    with RunningService(first.url, redis_server.url) as service:
        session = service.session()
        messages = [QUESTION, ask(service, session, [QUESTION]), MORE[0]]
        first.stop()
        running.callback(second.start(first.port).stop)
        if service_stays:
            wait_until(lambda: second.weights.label == "0", 120, "it is met")
            wait_for(service)
            ask(service, session, messages)
    with RunningService(second.url, redis_server.url) as later:
        if not service_stays:
            ask(later, session, messages)
        rows = check_rows(later, session, first, second)
    (generation,) = second.generations
    assert len(rows) == (1 if before == after else 2)
    assert (generation.prompt_ids == FAMILIES[after].render(messages)) == (before != after)


def change_version(engine: ScriptedEngine) -> None:
    engine.version = "0.33.0"


def change_model(engine: ScriptedEngine) -> None:
    engine.model = "another"


def lose_token_routes(engine: ScriptedEngine) -> None:
    del engine._routes["POST", GENERATE]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_version, {"version": "0.33.0", "api": "token"}),
        (change_model, {"models": ["another"], "api": "token"}),
        (lose_token_routes, {"api": "chat"}),
    ],
)
def test_a_session_goes_on_in_its_row_at_an_engine_that_came_back_otherwise(
    running: ExitStack, redis_server: RedisServer, change: Callable[[ScriptedEngine], None], expected: dict[str, Any]
) -> None:
    engine = running.enter_context(ScriptedEngine("qwen3"))
    engine.version = "0.32.0"
    engine.script = lambda generation, index: FAMILIES["qwen3"].speak(f"number {index}")
    service = running.enter_context(RunningService(engine.url, redis_server.url))
    session = service.session()
    messages = [QUESTION]
    for later in MORE:
        messages = [*messages, ask(service, session, messages), later]
    engine.stop()
    change(engine)
    engine.start(engine.port)
    wait_for(service, **expected)
    ask(service, session, messages)
    (row,) = check_rows(service, session, engine)
    assert len(row["call_ids"]) == 3


def test_an_adapter_that_goes_in_the_middle_of_a_session_is_no_other_model_and_its_row_goes_on_when_it_is_back(
    running: ExitStack, redis_server: RedisServer
) -> None:
    engine = running.enter_context(ScriptedEngine("qwen3", adapters=["a", "b"]))
    engine.script = lambda generation, index: FAMILIES["qwen3"].speak(f"number {index}")
    service = running.enter_context(RunningService(engine.url, redis_server.url))
    session = service.session()
    messages = [QUESTION, ask(service, session, [QUESTION], "a"), MORE[0]]
    folder = engine.weights.adapters.pop("a")
    wait_for(service, "a", status="down")
    with pytest.raises(openai.InternalServerError, match="no longer has the adapter 'a'"):
        ask(service, session, messages, "a")
    assert ask(service, session, messages, "b")
    engine.weights.adapters["a"] = folder
    wait_for(service, "a")
    ask(service, session, messages, "a")
    rows = check_rows(service, session, engine)
    assert sorted((row["policy"], len(row["call_ids"])) for row in rows) == [("a", 2), ("b", 1)]


# Services that see one engine differently.


@pytest.mark.parametrize(("other", "rows_of"), [({"engine_api": "chat"}, [""]), ({"policy": "critic"}, ["", "critic"])])
def test_two_services_of_one_store_that_see_an_engine_differently_record_one_session(
    running: ExitStack, redis_server: RedisServer, other: dict[str, Any], rows_of: list[str]
) -> None:
    """One takes it for a chat server, or for another policy's. Calls of two policies are never in one row."""
    engine = running.enter_context(ScriptedEngine("qwen3"))
    engine.script = lambda generation, index: FAMILIES["qwen3"].speak(f"number {index}")
    policy = other.pop("policy", "")
    url = f"{policy}={engine.url}" if policy else engine.url
    one = running.enter_context(RunningService(engine.url, redis_server.url, engine_api="token"))
    two = running.enter_context(RunningService(url, redis_server.url, **other))
    session = one.session()
    messages: list[Any] = [QUESTION]
    for service, later in zip((one, two, one), [*MORE, None], strict=True):
        messages = [*messages, ask(service, session, messages), later]
    rows = check_rows(two, session, engine)
    assert sorted({row["policy"] for row in rows}) == rows_of
    assert len(rows) == len(rows_of)
