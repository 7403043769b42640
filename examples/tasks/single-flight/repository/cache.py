"""What an asynchronous function gave, kept by its key."""


class Cache:
    def __init__(self, fetch):
        self._fetch = fetch
        self._values = {}

    async def get(self, key):
        if key not in self._values:
            self._values[key] = await self._fetch(key)
        return self._values[key]
