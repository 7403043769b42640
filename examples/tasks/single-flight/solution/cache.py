"""What an asynchronous function gave, kept by its key."""

import asyncio


class Cache:
    def __init__(self, fetch):
        self._fetch = fetch
        self._tasks = {}

    async def get(self, key):
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.ensure_future(self._fetch(key))
            task.add_done_callback(lambda done: self._forget(key, done))
        # Whoever is cancelled while waiting must not take the fetch along.
        return await asyncio.shield(task)

    def _forget(self, key, task):
        if task.cancelled() or task.exception() is not None:
            self._tasks.pop(key, None)
