"""An engine that knows the answers: a server of chat completions whose model runs a given command in each exercise, and ends.

Demonstrations are made with it through the agent itself: `verbatim generate` records what the expert said, in the token ids of the model
that is to learn it. Half of the answers that it is given are wrong, which the hidden checks find out. Its logprobs are 0.

    python -m examples.pretrained.expert --port 8000 --model-dir model --answers answers.json --agent pi
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import typer
from aiohttp import web

from examples.learn.agents import AGENTS, CliAgent, Message
from examples.learn.exercises import Exercise


class Expert:
    """`answers`: for each instruction the commands of its attempts, given in turn as they begin."""

    def __init__(self, tokenizer: Any, agent: CliAgent, answers: Mapping[str, Sequence[str]]) -> None:
        self._tokenizer = tokenizer
        self._agent = agent
        self._answers = {asked: cycle(commands) for asked, commands in answers.items()}

    def reply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One choice of a chat completion, with ids and logprobs, and `prompt_token_ids`."""
        messages, tools = _plain(body["messages"]), body.get("tools")
        said = self._say(messages)
        prompt = self._render(messages, tools, prompt=True)
        # The template puts a newline after the turn's end, which no model samples.
        ids = self._render([*messages, said], tools, prompt=False)[len(prompt) : -1]
        entries = [{"token": self._tokenizer.decode([token]), "logprob": 0.0, "top_logprobs": []} for token in ids]
        reason = "tool_calls" if said.get("tool_calls") else "stop"
        return {"prompt": prompt, "ids": ids, "message": said, "entries": entries, "finish_reason": reason}

    def _say(self, messages: Sequence[Message]) -> Message:
        asked = next(message["content"] for message in messages if message["role"] == "user")
        if asked not in self._answers:
            # The service samples a token at first contact.
            return {"role": "assistant", "content": "Hello"}
        turn = sum(message["role"] == "assistant" for message in messages)
        played = self._agent.play(Exercise("", asked, {}, {}, "", ""), "" if turn else next(self._answers[asked]))
        said = [message for message in played if message["role"] == "assistant"][turn]
        calls = [{**call, "id": f"call_{uuid.uuid4().hex[:12]}"} for call in said.get("tool_calls", ())]
        return {**said, "tool_calls": calls} if calls else said

    def _render(self, messages: Sequence[Message], tools: Any, *, prompt: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=prompt)
        return list(rendered["input_ids"])


def _plain(messages: Sequence[Message]) -> list[Message]:
    """The messages as vLLM hands them to a chat template: arguments are objects, a text is one string."""
    plain: list[Message] = []
    for message in messages:
        content, calls = message.get("content") or "", message.get("tool_calls") or ()
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        loaded = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}} for call in calls
        ]
        plain.append({**message, "content": content, **({"tool_calls": loaded} if loaded else {})})
    return plain


def make_app(expert: Expert) -> web.Application:
    """`/v1/models` and `/v1/chat/completions`, whole and streamed (a reply in one piece), in vLLM's shapes."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 8192}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "messages" not in body:
            return web.json_response({"error": {"message": "messages are missing", "code": 400}}, status=400)
        reply = expert.reply(body)
        usage = {"prompt_tokens": len(reply["prompt"]), "completion_tokens": len(reply["ids"])}
        usage["total_tokens"] = sum(usage.values())
        choice = {"index": 0, "finish_reason": reply["finish_reason"], "token_ids": reply["ids"]}
        choice["logprobs"] = {"content": reply["entries"]}
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": 0, "model": "policy", "prompt_token_ids": reply["prompt"]}
        if not body.get("stream"):
            choice["message"] = reply["message"]
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        calls = [{"index": index, **call} for index, call in enumerate(reply["message"].get("tool_calls", ()))]
        choice["delta"] = {**reply["message"], **({"tool_calls": calls} if calls else {})}
        events = [{**head, "choices": [choice]}, {**head, "choices": [], "usage": usage}]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in (*(json.dumps({"object": "chat.completion.chunk", **event}) for event in events), "[DONE]"):
            await answer.write(f"data: {event}\n\n".encode())
        await answer.write_eof()
        return answer

    app = web.Application(client_max_size=2**24)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", complete)])
    return app


def main(
    port: Annotated[int, typer.Option(help="On 127.0.0.1.")],
    model_dir: Annotated[Path, typer.Option(help="Whose tokenizer and chat template it speaks.")],
    answers: Annotated[Path, typer.Option(help="A JSON object: for each instruction the commands of its attempts.")],
    agent: Annotated[str, typer.Option(help=", ".join(AGENTS))],
) -> None:
    """Serve until stopped."""
    from transformers import AutoTokenizer

    expert = Expert(AutoTokenizer.from_pretrained(model_dir), AGENTS[agent], json.loads(answers.read_text()))
    web.run_app(make_app(expert), host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    typer.run(main)
