"""A headless Chromium for the tests of the page, with what it said and asked for."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


class Browser:
    """Opens files, and remembers the messages of the console and the requests of each page."""

    def __init__(self, folder: Path) -> None:
        driver = shutil.which("chromedriver")
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        if driver is None or chromium is None:
            pytest.skip("needs chromium and chromedriver: apt-get install chromium-driver")
        webdriver = pytest.importorskip("selenium.webdriver", reason="needs pip install selenium")
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))

    def open(self, file: Path, *, width: int = 1280, scheme: str = "light") -> None:
        """Open a file anew, in a window of this width and with this colour scheme."""
        self.run("try { localStorage.clear() } catch {}")  # the theme that another test chose
        self.messages()
        self.requests()
        self.emulate(scheme=scheme)
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.driver.get(file.as_uri())
        self.settle()  # figures are drawn again after a change of width

    def settle(self) -> None:
        """Wait for two frames: what scrolling and resizing set off has then happened."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"
        )

    def emulate(self, *, scheme: str = "light", media: str = "") -> None:
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
        ]
        self.command("Emulation.setEmulatedMedia", media=media, features=features)

    def command(self, name: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript function body."""
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
        )

    def click(self, selector: str, at: int = 0) -> None:
        found = self.driver.find_elements("css selector", selector)
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found[at])
        found[at].click()

    def hover(self, selector: str, at: int = 0) -> None:
        """Move the mouse to the middle of an element."""
        x, y = self.middle(selector, at)
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str, at: int) -> tuple[float, float]:
        """Where the middle of an element is, after scrolling to it."""
        found = self.driver.find_elements("css selector", selector)[at]
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found)
        self.settle()
        x, y = self.run(
            "const b = arguments[0].getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]",
            found,
        )
        return x, y

    def tooltip(self) -> str | None:
        """The text of the tooltip, None while it is hidden."""
        return self.run(
            "const t = document.getElementById('tooltip');"
            "return t.hidden || !t.getBoundingClientRect().width ? null : t.innerText"
        )

    def messages(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        kept = ("WARNING", "SEVERE")
        return [m["message"] for m in self.driver.get_log("browser") if m["level"] in kept]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since the last call (not the browser's start page)."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
            and event["params"]["documentURL"].startswith("file:")
        ]

    def pdf(self) -> bytes:
        printed = self.command("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(printed["data"])

    def close(self) -> None:
        self.driver.quit()
