import asyncio
import unittest

import cache


class Source:
    """Gives values once `open` is set; `asked` has the keys it was asked for."""

    def __init__(self, failing=()):
        self.asked = []
        self.open = asyncio.Event()
        self.failing = failing

    async def fetch(self, key):
        self.asked.append(key)
        await self.open.wait()
        if key in self.failing:
            raise LookupError(key)
        return key.upper()


async def started(cached, *keys):
    """One task for each of `keys`, all of which have come as far as they can."""
    tasks = [asyncio.ensure_future(cached.get(key)) for key in keys]
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


class Cache(unittest.IsolatedAsyncioTestCase):
    async def test_kept(self):
        source = Source()
        source.open.set()
        cached = cache.Cache(source.fetch)
        self.assertEqual([await cached.get("a"), await cached.get("a")], ["A", "A"])
        self.assertEqual(source.asked, ["a"])

    async def test_one_fetch_for_all(self):
        source = Source()
        tasks = await started(cache.Cache(source.fetch), "a", "a", "a")
        source.open.set()
        self.assertEqual(await asyncio.gather(*tasks), ["A", "A", "A"])
        self.assertEqual(source.asked, ["a"])

    async def test_side_by_side(self):
        source = Source()
        tasks = await started(cache.Cache(source.fetch), "a", "b")
        self.assertEqual(sorted(source.asked), ["a", "b"])
        source.open.set()
        self.assertEqual(await asyncio.gather(*tasks), ["A", "B"])

    async def test_a_failure_is_shared(self):
        source = Source(failing=("a",))
        tasks = await started(cache.Cache(source.fetch), "a", "a")
        source.open.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self.assertEqual([type(result) for result in results], [LookupError, LookupError])
        self.assertEqual(source.asked, ["a"])

    async def test_a_failure_is_not_kept(self):
        source = Source(failing=("a",))
        source.open.set()
        cached = cache.Cache(source.fetch)
        for _ in range(2):
            with self.assertRaises(LookupError):
                await cached.get("a")
        source.failing = ()
        self.assertEqual(await cached.get("a"), "A")
        self.assertEqual(source.asked, ["a", "a", "a"])

    async def test_one_is_cancelled(self):
        source = Source()
        first, second = await started(cache.Cache(source.fetch), "a", "a")
        first.cancel()
        await asyncio.wait([first])
        source.open.set()
        self.assertEqual(await second, "A")
        self.assertEqual(source.asked, ["a"])
