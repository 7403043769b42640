"""The agent: an ordinary script on the openai SDK that shows a model screenshots and clicks where it says. Nothing of Verbatim.

It reads and writes lines as `examples.demo.agent` does; a job's `doors` are the screens. An answer that is no click ends the attempt.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from examples.demo.agent import work
from examples.screen.screens import ask_message, draw, find_target, read_click


async def attempt(client: AsyncOpenAI, job: dict[str, Any]) -> dict[str, Any]:
    """The outcome of one job."""
    messages: list[Any] = []
    clicked: list[bool] = []
    outcome: dict[str, Any] = {"job_id": job["job_id"], "turns": 0, "completion_tokens": 0, "error": None}
    try:
        for screen in job["doors"]:
            url = f"data:image/png;base64,{base64.b64encode(draw(screen)).decode()}"
            messages.append(ask_message({"type": "image_url", "image_url": {"url": url}}))
            reply = await client.chat.completions.create(
                model=job["model"], messages=messages, max_tokens=job["max_tokens"], extra_body=job["extra_body"]
            )
            outcome["turns"] += 1
            outcome["completion_tokens"] += reply.usage.completion_tokens
            message = reply.choices[0].message
            click = read_click(message.content or "")
            if click is None:
                break
            clicked.append(click == find_target(screen))
            messages.append(message.model_dump(exclude_none=True))
    except OpenAIError as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    return outcome | {"opened": clicked, "reward": sum(clicked) / len(job["doors"])}


if __name__ == "__main__":
    asyncio.run(work(attempt))
