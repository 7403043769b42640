"""A real Chromium without a window, driven over WebDriver, and what axe finds against a page."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.machine import require

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",
)
PATIENCE_SECONDS = 60.0
HURRY = "{ const often = setInterval; window.setInterval = (run, milliseconds) => often(run, milliseconds / 10) }"


class Browser:
    """One window of it."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def one(self, selector: str) -> WebElement:
        """The first element, once it is there."""
        return self.wait(lambda: next(iter(self.all(selector)), None), selector)

    def all(self, selector: str) -> list[WebElement]:
        found: list[Any] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def text(self, selector: str) -> str:
        """Of the first such element, once it is there."""
        return str(self.wait(lambda: [self.one(selector).text], selector)[0])

    def texts(self, selector: str) -> list[str]:
        """Those of all such elements at one moment: a live part is exchanged between two questions."""
        shown: list[str] = self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", selector)
        return shown

    def focused(self, selector: str) -> None:
        """Returns when that has the focus, as it is given some time after a page was opened."""
        self.wait(lambda: self.run("return document.activeElement.matches(arguments[0])", selector), f"focus on {selector}")

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        """What `found` gives once it is true of the page. An element that is exchanged while it is looked at is looked for again."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with suppress(StaleElementReferenceException):
                if got := found():
                    return got
            assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} s: {what}"
            time.sleep(0.02)

    def prefer(self, scheme: str) -> None:
        """What the system says it likes: dark or light."""
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """What pages that are opened inside do every few seconds, as to look for news, they do ten times as often."""
        added = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HURRY})
        yield
        self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    def complaints(self) -> list[str]:
        """What the console was told since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def barriers(self) -> list[str]:
        """What axe finds on this page that is serious or critical."""
        self.run(files("axe_core_python").joinpath("axe.min.js").read_text("utf-8"))
        # Every element that passes a rule would be described, too, and sent here.
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run({resultTypes: ['violations']}).then(found => done(found.violations));"
        )
        return [
            f"{each['id']}: {each['nodes'][0]['html'][:200]} {each['nodes'][0]['failureSummary'][:200]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def running_browser() -> Iterator[Browser]:
    program, driver = require("chromium"), require("chromedriver")
    with tempfile.TemporaryDirectory(prefix="verbatim-browser-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = program
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        made = Chrome(options=options, service=Service(executable_path=driver))
        try:
            made.set_script_timeout(4 * PATIENCE_SECONDS)
            yield Browser(made)
        finally:
            made.quit()
