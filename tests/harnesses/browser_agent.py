"""A program on browser-use, with its defaults: `browser_agent.py CHROMIUM TASK` writes what the agent says in the end."""

import asyncio
import sys

from browser_use import Agent, Browser, ChatOpenAI


async def main(program: str, task: str) -> None:
    # Extensions are fetched; a browser of root has no sandbox of its own.
    browser = Browser(executable_path=program, headless=True, chromium_sandbox=False, enable_default_extensions=False)
    history = await Agent(task, ChatOpenAI(model="policy"), browser).run(max_steps=6)
    sys.stdout.write(history.final_result() or "")


asyncio.run(main(*sys.argv[1:]))
