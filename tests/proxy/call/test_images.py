"""Agents that see: images of every dialect on the token path, placed in the ids that the model saw, kept once, and refused before anything
is kept where they cannot be taken."""

from __future__ import annotations

import base64
import hashlib
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from proxy.call import door
from proxy.images import ImageBounds, check_image
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.engine.scripted_images import END, PAD, SEEING, START, picture, url_of
from tests.support.engine.template_markup import Parsed
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.service.verbatim_process import ADMIN, TRAINER

RED, BLUE, WIDE = picture("red"), picture("blue"), picture("green", (64, 16))
SHOTS = (RED, BLUE, WIDE, picture("white"))
PIXELS = 64 * 64
BASE64_OF_URLS = str.maketrans("+/", "-_")


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Running]:
    redis_server.flushall()
    bounds: dict[str, Any] = {"images": ImageBounds(20_000, PIXELS, per_call=6, per_session=5)}
    with (
        ScriptedEngine(SEEING, most_images=4) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", **bounds) as token,
        RunningService(engine.url, redis_server.url, engine_api="chat", **bounds) as chat,
    ):
        yield engine, {"token": token, "chat": chat}


@pytest.fixture
def session(token_service: RunningService, engine: ScriptedEngine) -> Session:
    return token_service.session()


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[redis.Redis]:
    redis_server.flushall()
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kept(store: redis.Redis) -> set[str]:
    """The digests whose bytes the store has."""
    return {key.decode().split(":", 2)[2].split("}")[0] for key in store.keys("vb:{m:*:bytes")}


def keys_of(store: redis.Redis) -> set[bytes]:
    """Without the heartbeat of the service."""
    return {key for key in store.keys("*") if isinstance(key, bytes)} - {b"vb:processes"}


def image(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data, kind)}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]}


def placed(call: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Digest and ids of each image of the call's prompt."""
    ids = call["prompt_ids"]
    return [(each["digest"], ids[each["start"] : each["start"] + each["length"]]) for each in call["media"]]


def requests_of(data: bytes, kind: str = "image/png") -> dict[str, tuple[str, dict[str, Any]]]:
    """The same image in each dialect's form."""
    text = base64.b64encode(data).decode()
    shown = {"type": "input_image", "image_url": url_of(data, kind), "detail": "high"}
    block = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": text}}
    part = {"inlineData": {"mimeType": kind, "data": text}}
    items = [{"role": "user", "content": [shown, {"type": "input_text", "text": "see"}]}]
    blocks = [{"role": "user", "content": [block, {"type": "text", "text": "see"}]}]
    contents = [{"role": "user", "parts": [part, {"text": "see"}]}]
    return {
        "chat": ("/v1/chat/completions", {"model": "policy", "messages": [user(image(data, kind), "see")]}),
        "responses": ("/v1/responses", {"model": "policy", "input": items}),
        "messages": ("/v1/messages", {"model": "policy", "max_tokens": 9, "messages": blocks}),
        "gemini": ("/v1beta/models/policy:generateContent", {"contents": contents}),
    }


DIALECTS = pytest.mark.parametrize("dialect", sorted(requests_of(RED)))


@pytest.mark.case(70)
@DIALECTS
def test_an_image_of_any_dialect_is_placed_in_the_ids_that_the_model_saw(
    engine: ScriptedEngine, session: Session, dialect: str
) -> None:
    path, body = requests_of(RED)[dialect]
    answer = session.post(path, body)
    assert answer.status_code == 200, answer.text
    (call,) = session.calls
    pad = SEEING.id_of(PAD)
    assert placed(call) == [(digest(RED), [pad] * 4)]
    start = call["media"][0]["start"]
    assert call["prompt_ids"][start - 1] == SEEING.id_of(START) and call["prompt_ids"][start + 4] == SEEING.id_of(END)
    assert call["prompt_ids"] == engine.last.prompt_ids
    assert call["messages"][-1]["content"][0] == {"type": "image", "digest": digest(RED)}
    assert engine.last.body["token_ids"].count(pad) == len(engine.last.body["content_parts"]) == 1
    ((row,), accounting) = session.trajectories()
    assert row["media"] == call["media"] and accounting["complete"]
    assert not any(row["loss_mask"][start : start + 4])


@pytest.mark.case(71)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_images_of_several_turns_and_in_tool_results_make_one_row(
    engine: ScriptedEngine, session: Session, stream: bool
) -> None:
    engine.say(SEEING.speak(calls=[("lookup", {"key": "a"})]), "first", "second")
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
    history: list[Any] = [user("which?", image(RED), "or", image(BLUE))]

    def ask() -> Any:
        if stream:
            list(session.ask(history, stream=True, tools=tools))
            return session.calls[-1]["reply"]
        return session.answer(history, tools=tools)

    message = ask()
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": user("seen", image(WIDE))["content"]}
    history += [message, result]
    history += [ask(), user(image(RED))]
    ask()
    calls = session.calls
    assert [call["branch_reason"] for call in calls] == [None] * 3
    assert [each for each, _ in placed(calls[-1])] == [digest(data) for data in (RED, BLUE, WIDE, RED)]
    assert calls[-1]["prompt_ids"] == engine.last.prompt_ids
    assert [(each["start"], each["length"]) for each in calls[-1]["media"]] == [
        (each["offset"], each["length"]) for each in engine.last.placeholders
    ]
    ((row,), accounting) = session.trajectories()
    assert row["media"] == calls[-1]["media"] and accounting["complete"]


HIDING = r"""
{%- set query = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set query.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {{- message.content.split('</think>')[-1] if loop.index0 < query.last else message.content }}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""A template that shows a thought in the content only after the latest user message."""


@pytest.mark.parametrize("thinking", ["template", "retain"])
def test_a_thought_in_the_content_of_a_reply_about_images_branches_or_is_retained_and_all_images_are_placed(
    redis_server: RedisServer, tmp_path: Path, thinking: str
) -> None:
    """An engine leaves a thought there without a reasoning parser, and when a call turned thinking off."""
    template = tmp_path / "hiding.jinja"
    template.write_text(HIDING, encoding="utf-8")
    unparsed = replace(SEEING.markup, parse=lambda text, tools, opened: Parsed(None, text))
    family = replace(SEEING, name=f"qwen3-hiding-{thinking}", file=template, markup=unparsed)
    with (
        ScriptedEngine(family, most_images=4) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", thinking=thinking) as service,
    ):
        session = service.session()
        engine.say("like fire</think>red<|im_end|>", "green")
        history: list[Any] = [user("which?", image(RED), "or", image(BLUE))]
        history += [session.answer(history), user("and", image(WIDE))]
        session.answer(history)
        first, second = session.calls
        rows, accounting = session.trajectories()
        seen, ranges = engine.last.prompt_ids, engine.last.placeholders
    assert history[1]["content"] == "like fire</think>red"
    retained = thinking == "retain"
    assert second["branch_reason"] == (None if retained else "thinking_dropped")
    so_far = [*first["prompt_ids"], *first["completion_ids"]]
    assert (second["prompt_ids"][: len(so_far)] == so_far) == (family.id_of("</think>") in second["prompt_ids"]) == retained
    assert second["prompt_ids"] == seen
    assert [each for each, _ in placed(second)] == [digest(data) for data in (RED, BLUE, WIDE)]
    assert [(each["start"], each["length"]) for each in second["media"]] == [(at["offset"], at["length"]) for at in ranges]
    assert len(rows) == (1 if retained else 2) and accounting["complete"]
    assert [row["media"] for row in rows][-1] == second["media"]
    sampled = [len(call["completion_ids"]) for call in (first, second)]
    assert [sum(row["loss_mask"]) for row in rows] == ([sum(sampled)] if retained else sampled)


def results_of(data: bytes, call_id: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A conversation whose tool result is an image, in each dialect's form."""
    text, schema = base64.b64encode(data).decode(), {"type": "object", "properties": {}}
    asked: dict[str, Any] = {"role": "user", "content": "q"}
    output = [{"type": "input_image", "image_url": url_of(data)}]
    items = [
        {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call_id, "output": output},
    ]
    use = {"type": "tool_use", "id": call_id, "name": "look", "input": {}}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": [block]}
    blocks = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    part = {"inlineData": {"mimeType": "image/png", "data": text}}
    response = {"functionResponse": {"name": "look", "response": {}, "parts": [part]}}
    contents = [
        {"role": "user", "parts": [{"text": "q"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
        {"role": "user", "parts": [response]},
    ]
    tools = {
        "responses": [{"type": "function", "name": "look", "parameters": schema}],
        "messages": [{"name": "look", "input_schema": schema}],
        "gemini": [{"functionDeclarations": [{"name": "look"}]}],
    }
    return {
        "responses": ("/v1/responses", {"model": "policy", "input": [asked, *items], "tools": tools["responses"]}),
        "messages": (
            "/v1/messages",
            {"model": "policy", "max_tokens": 9, "messages": [asked, *blocks], "tools": tools["messages"]},
        ),
        "gemini": ("/v1beta/models/policy:generateContent", {"contents": contents, "tools": tools["gemini"]}),
    }


@pytest.mark.case(71)
@pytest.mark.parametrize("dialect", ["responses", "messages", "gemini"])
def test_an_image_in_a_tool_result_of_any_dialect_is_placed(session: Session, dialect: str) -> None:
    answer = session.post(*results_of(RED, "toolu_1")[dialect])
    assert answer.status_code == 200, answer.text
    (call,) = session.calls
    assert call["messages"][-1]["role"] == "tool"
    assert [each for each, _ in placed(call)] == [digest(RED)]


@pytest.mark.case(70)
def test_the_same_bytes_in_any_form_are_one_image(engine: ScriptedEngine, session: Session, store: redis.Redis) -> None:
    """Another base64, another declared type, another dialect's form, and the digest that names it."""
    session = session_of(session)
    for form in [*forms_of(RED), {"type": "image_url", "image_url": {"url": f"sha256:{digest(RED)}"}}]:
        session.answer([user(form, "see")])
    for path, body in requests_of(RED).values():
        assert session.post(path, body).status_code == 200
    named = {"fileData": {"mimeType": "image/png", "fileUri": f"sha256:{digest(RED)}"}}
    body = {"contents": [{"role": "user", "parts": [named, {"text": "see"}]}]}
    assert session.post("/v1beta/models/policy:generateContent", body).status_code == 200
    assert kept(store) == {digest(RED)}
    assert {tuple(each["digest"] for each in call["media"]) for call in session.calls} == {(digest(RED),)}
    # All of them have the same history, so each is another sample of the same request.
    assert {call["branch_reason"] for call in session.calls[1:]} == {"repeated"}
    assert store.get(f"vb:{{m:{digest(RED)}}}:bytes") == RED


def test_an_image_that_the_session_has_had_is_not_decoded_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def check(data: bytes, bounds: ImageBounds) -> None:
        decoded.append(data)
        check_image(data, bounds)

    monkeypatch.setattr(door, "check_image", check)
    for content in ((image(RED), "see"), (image(RED), image(BLUE), "and now")):
        assert session.post("/v1/chat/completions", {"model": "policy", "messages": [user(*content)]}).status_code == 200
    assert decoded == [RED, BLUE]


def session_of(session: Session) -> Session:
    """A new one: the store was emptied."""
    return session._service.session()


@pytest.mark.case(71)
def test_an_edited_image_branches_though_its_ids_are_the_same(engine: ScriptedEngine, session: Session) -> None:
    first = session.answer([user(image(RED), "which?")])
    session.answer([user(image(RED), "which?"), first, user("sure?")])
    session.answer([user(image(BLUE), "which?"), first, user("sure?")])
    one, two, edited = session.calls
    assert two["parent_id"] == one["call_id"] and edited["parent_id"] is None
    assert edited["prompt_ids"][: len(one["prompt_ids"])] == one["prompt_ids"]
    rows, accounting = session.trajectories()
    assert sorted([each["digest"] for each in row["media"]] for row in rows) == sorted([[digest(RED)], [digest(BLUE)]])
    assert accounting["complete"] and accounting["quarantined"] == []


@pytest.mark.case(71)
def test_a_sliding_window_of_screenshots_branches_and_stores_no_image_twice(
    engine: ScriptedEngine, session: Session, store: redis.Redis
) -> None:
    session = session_of(session)
    shots = [RED, BLUE, WIDE]
    history: list[Any] = []
    for at, shot in enumerate(shots):
        history.append(user(image(shot), f"step {at}"))
        if at == 2:
            history[0] = user("[an older screenshot]", "step 0")
        history.append(session.answer(history))
    assert [call["branch_reason"] is None for call in session.calls] == [True, True, False]
    assert [each for each, _ in placed(session.calls[-1])] == [digest(BLUE), digest(WIDE)]
    assert kept(store) == {digest(shot) for shot in shots}
    rows, accounting = session.trajectories()
    assert [len(row["media"]) for row in rows] == [2, 2] and accounting["complete"]
    # No record repeats an image's bytes.
    assert sum(map(len, store.lrange(f"vb:{{s:{session.session_id}}}:calls", 0, -1))) < 5000


def forms_of(data: bytes) -> list[dict[str, Any]]:
    """Ways to send the same image."""
    text = base64.b64encode(data).decode()
    return [
        image(data),
        image(data, "image/jpeg"),
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text[:40]}%0A{text[40:]}", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text.translate(BASE64_OF_URLS).rstrip('=')}"}},
    ]


class PictureTalk:
    """A harness that talks about images and does with its history what it likes: it sends old images in another form, exchanges one, or
    leaves one out. `said` is the history as it means it: the text, and the images that each message shows."""

    def __init__(self, seed: int, session: Session) -> None:
        self._dice = random.Random(seed)
        self._session = session
        self.said: list[tuple[Any, ...]] = []
        self.asked: list[list[tuple[Any, ...]]] = []
        """The history of each call, with its reply."""

    def ask(self, turn: int) -> None:
        shown = [self._dice.choice(SHOTS) for _ in range(self._dice.choice((0, 1, 1, 2)))]
        self.said.append(("user", f"turn {turn}", *shown))
        if self._dice.random() < 0.4:
            self._edit()
        while len(self.images) > 4:
            self._leave_out()
        message = self._session.answer([self._send(*message) for message in self.said])
        self.said.append(("assistant", message["content"]))
        self.asked.append(list(self.said))

    @property
    def images(self) -> list[bytes]:
        return [data for _, _, *shown in self.said for data in shown]

    def _edit(self) -> None:
        at = self._dice.randrange(len(self.said))
        role, text, *shown = self.said[at]
        if shown:
            shown[self._dice.randrange(len(shown))] = self._dice.choice(SHOTS)
            self.said[at] = (role, text, *shown)

    def _leave_out(self) -> None:
        at = next(at for at, (_, _, *shown) in enumerate(self.said) if shown)
        self.said[at] = (*self.said[at][:2], *self.said[at][3:])

    def _send(self, role: str, text: str, *shown: bytes) -> dict[str, Any]:
        return user(text, *(self._dice.choice(forms_of(data)) for data in shown)) if role == "user" else turn_of(text)


def turn_of(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_harness_does_with_its_images_every_call_has_those_that_the_model_saw(
    engine: ScriptedEngine, session: Session, store: redis.Redis, seed: int
) -> None:
    session = session_of(session)
    talk, before = PictureTalk(seed, session), len(engine.generations)
    for turn in range(7):
        talk.ask(turn)
    calls = session.calls
    for call, made, asked in zip(calls, engine.generations[before:], talk.asked, strict=True):
        assert call["prompt_ids"] == made.prompt_ids
        assert [(each["start"], each["length"]) for each in call["media"]] == [
            (place["offset"], place["length"]) for place in made.placeholders
        ]
        shown = [data for _, _, *shown in asked for data in shown]
        assert [each["digest"] for each in call["media"]] == [digest(data) for data in shown]
        # It goes on from the longest history that it begins with, and from none that shows another image.
        known = [(len(old), other["call_id"]) for old, other in zip(talk.asked, calls, strict=True) if old == asked[: len(old)]]
        longer = [call_id for length, call_id in sorted(known) if length < len(asked)]
        assert call["parent_id"] == (longer[-1] if longer else None)
    rows, accounting = session.trajectories()
    assert accounting["complete"] and accounting["quarantined"] == []
    assert accounting["exported_tokens"] == sum(sum(row["loss_mask"]) for row in rows) == accounting["sampled_tokens"]
    by_id = {call["call_id"]: call for call in calls}
    for row in rows:
        assert row["media"] == by_id[row["call_ids"][-1]]["media"]
        assert not any(any(row["loss_mask"][each["start"] : each["start"] + each["length"]]) for each in row["media"])
    assert kept(store) == {digest(data) for asked in talk.asked for _, _, *shown in asked for data in shown}


def test_an_image_goes_with_the_last_session_that_refers_to_it(
    engine: ScriptedEngine, session: Session, token_service: RunningService, store: redis.Redis
) -> None:
    one, other = session_of(session), session_of(session)
    one.answer([user(image(RED), image(BLUE))])
    other.answer([user(image(RED))])
    for held in (one, other):
        answer = token_service.request("GET", f"/sessions/{held.session_id}/media/{digest(RED)}", TRAINER)
        assert (answer.content, answer.headers["content-type"]) == (RED, "image/png")
    assert token_service.request("GET", f"/sessions/{other.session_id}/media/{digest(BLUE)}", TRAINER).status_code == 404
    assert token_service.request("DELETE", f"/sessions/{one.session_id}").status_code == 204
    assert kept(store) == {digest(RED)}
    assert token_service.request("DELETE", f"/sessions/{other.session_id}").status_code == 204
    assert not store.keys("*media*") and not store.keys("vb:{m:*")


def test_images_count_towards_the_session_and_another_process_finds_them(
    engine: ScriptedEngine, session: Session, redis_server: RedisServer, store: redis.Redis
) -> None:
    session = session_of(session)
    session.answer([user(image(RED))])
    state = store.hgetall(f"vb:{{s:{session.session_id}}}:state")
    assert int(state[b"bytes"]) > len(RED)
    with RunningService(engine.url, redis_server.url, engine_api="token") as other:
        body = {"model": "policy", "messages": [user({"type": "image_url", "image_url": {"url": f"sha256:{digest(RED)}"}})]}
        answer = session.post("/v1/chat/completions", body, at=other)
        assert answer.status_code == 200, answer.text
    assert placed(session.calls[-1])[0][0] == digest(RED)


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and has no data for it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BAD = {
    "cut short": (RED[:-30], "cannot be decoded"),
    "empty": (b"", "cannot be decoded"),
    "no image": (b"hello", "cannot be decoded as PNG, JPEG, WEBP, GIF"),
    "a format that is not taken": (picture("red", format="BMP"), "cannot be decoded"),
    "a bomb": (bomb(50_000, 50_000), f"50000 x 50000 pixels, of at most {PIXELS}"),
    "too large": (RED + b"\0" * 20_000, "bytes, of at most 20000"),
}


@pytest.mark.case(79)
@DIALECTS
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_image_is_refused_in_the_dialects_shape_and_nothing_is_kept(
    engine: ScriptedEngine, session: Session, store: redis.Redis, dialect: str, bad: str
) -> None:
    session = session_of(session)
    data, reason = BAD[bad]
    path, body = requests_of(data)[dialect]
    before = keys_of(store)
    answer = session.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert reason in error["message"]
    assert {"chat": "type", "responses": "type", "messages": "type", "gemini": "status"}[dialect] in error
    assert session.calls == [] and engine.generations == []
    assert keys_of(store) == before


@pytest.mark.case(79)
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user(*[image(RED)] * 7)], "7 images, of at most 6"),
        ([user(*[image(RED)] * 5)], "At most 4 image(s) may be provided in one prompt"),
        ([user(*(image(picture((shade, 0, 0))) for shade in range(6)))], "of at most 5"),
        ([user({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})], "its image by a URL"),
        ([user({"type": "image_url", "image_url": {"url": "data:image/png;base64,####"}})], "base64 cannot be decoded"),
        ([user({"type": "image_url", "image_url": {"url": "data:image/png"}})], "no comma"),
        ([user({"type": "image_url", "image_url": {"url": 7}})], "URL as a string"),
        ([user({"type": "image_url"})], "URL as a string"),
        ([user({"image_url": "https://example.com/a.png"})], "its image by a URL"),
        ([user({"input_audio": {"data": "", "format": "wav"}})], "has a part of type 'input_audio'"),
        ([user({"type": "image_url", "image_url": {"url": "sha256:" + "0" * 64}})], "has sent no image with the digest"),
        ([user({"type": "image_url", "image_url": {"url": "sha256:0"}})], "named by its digest"),
        ([user(f"a {PAD} of my own", image(RED))], "contains the placeholder that stands for an image"),
        ([user({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}})], "its video by a URL"),
        ([user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})], "has a part of type 'input_audio'"),
    ],
)
def test_what_cannot_be_placed_is_refused_and_nothing_is_kept(
    engine: ScriptedEngine, session: Session, store: redis.Redis, messages: list[Any], reason: str
) -> None:
    session = session_of(session)
    before = keys_of(store)
    answer = session.post("/v1/chat/completions", {"model": "policy", "messages": messages})
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    assert session.calls == []
    assert keys_of(store) == before
    assert session.answer("still there?")["content"]


@pytest.mark.case(79)
@DIALECTS
def test_a_model_that_takes_no_images_says_so_in_the_dialects_shape(
    engine: ScriptedEngine, session: Session, store: redis.Redis, dialect: str
) -> None:
    session, engine.most_images = session_of(session), 0
    before = keys_of(store)
    try:
        answer = session.post(*requests_of(RED)[dialect])
    finally:
        engine.most_images = 4
    error = answer.json()["error"]
    assert answer.status_code == 400 and "policy is not a multimodal model" in error["message"]
    assert {"chat": "type", "responses": "type", "messages": "type", "gemini": "status"}[dialect] in error
    assert session.calls == [] and engine.generations == [] and keys_of(store) == before


def test_an_sdk_reads_the_refusal_of_an_image(session: Session) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be decoded") as raised:
        session.ask([user("see", image(b"hello"))])
    assert raised.value.param == "messages"


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {}), ("WEBP", {"lossless": True}), ("GIF", {})])
def test_other_formats_are_taken(engine: ScriptedEngine, session: Session, kind: str, options: dict[str, Any]) -> None:
    data = picture("blue", format=kind, **options)
    session.answer([user(image(data, f"image/{kind.lower()}"))])
    assert [each for each, _ in placed(session.calls[0])] == [digest(data)]
    assert engine.last.body["content_parts"][0]["url"] == url_of(data, f"image/{kind.lower()}")


@pytest.mark.case(72)
def test_a_placeholder_is_never_sampled_nor_trained(engine: ScriptedEngine, session: Session) -> None:
    """An engine that is given images would take a sampled one for the next image's. This engine heeds no bias."""
    pad = SEEING.id_of(PAD)
    engine.say(Say(token_ids=[*SEEING.encode("fish"), pad, SEEING.end_id]))
    session.ask([user(image(RED))], logit_bias={"7": 1})
    assert engine.last.sampling["logit_bias"] == {"7": 1, str(pad): -100.0}
    (call,) = session.calls
    _, accounting = session.trajectories()
    assert [(item["call_id"], item["reason"]) for item in accounting["quarantined"]] == [
        (call["call_id"], "placeholder_sampled")
    ]
    session.answer("hello")
    assert "logit_bias" not in engine.last.sampling


@DIALECTS
def test_on_the_chat_path_an_image_is_passed_on(engine: ScriptedEngine, running: Running, dialect: str) -> None:
    answer = running[1]["chat"].session().post(*requests_of(RED)[dialect])
    assert answer.status_code == 200, answer.text
    assert engine.last.messages is not None
    assert engine.last.messages[-1]["content"][0] == image(RED)


def test_on_the_chat_path_an_image_is_kept_and_not_trained(
    engine: ScriptedEngine, running: Running, store: redis.Redis
) -> None:
    """A chat endpoint tells ids, but not which of them stand for an image."""
    session = running[1]["chat"].session()
    first = session.answer([user(image(RED))])
    session.answer([user(image(RED)), first, user("and?")])
    assert [part["type"] for part in (engine.last.messages or [])[0]["content"]] == ["image_url"]
    assert kept(store) == {digest(RED)}
    rows, accounting = session.trajectories()
    assert rows == [] and {item["reason"] for item in accounting["quarantined"]} == {"no_token_ids"}
    assert [call["parent_id"] for call in session.calls] == [None, session.calls[0]["call_id"]]


def test_tokens_are_counted_with_their_images(session: Session) -> None:
    _, body = requests_of(RED)["messages"]
    counted = session.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert session.post("/v1/messages", body).json()["usage"]["input_tokens"] == counted == len(session.calls[0]["prompt_ids"])


def test_a_stored_response_names_its_image_so_that_it_can_be_sent_again(session: Session) -> None:
    path, body = requests_of(RED)["responses"]
    stored = session.post(path, body).json()
    items = session.request("GET", f"/v1/responses/{stored['id']}/input_items").json()["data"]
    assert items[0]["content"][0] == {"type": "input_image", "detail": "auto", "image_url": f"sha256:{digest(RED)}"}
    again = {
        "model": "policy",
        "input": [{"role": "user", "content": items[0]["content"]}],
        "previous_response_id": stored["id"],
    }
    assert session.post(path, again).status_code == 200
    assert [each for each, _ in placed(session.calls[1])] == [digest(RED)] * 2
    assert len(session.trajectories()[0]) == 1


def test_pillow_is_imported_with_the_first_image() -> None:
    code = "import sys, proxy.app; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pages_show_the_images(session: Session, token_service: RunningService) -> None:
    session.answer([user("see", image(RED), image(BLUE))])
    (call,) = session.calls
    page = f"/ui/sessions/{session.session_id}"
    with httpx.Client(base_url=token_service.url, timeout=120) as browser:
        assert browser.post("/ui/login", data={"token": ADMIN}, headers={"origin": token_service.url}).status_code in (200, 303)
        for number, data in enumerate((RED, BLUE)):
            path = f"{page}/calls/{call['call_id']}/messages/0/images/{number}"
            assert path in browser.get(page).text
            answer = browser.get(path)
            assert (answer.content, answer.headers["content-type"]) == (data, "image/png")
        whole = browser.get(f"{page}/download/page.html").text
        assert f'src="{url_of(RED)}"' in whole and "sha256:" not in whole.partition("<body")[2].partition("<script")[0]
