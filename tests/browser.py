"""Headless Chromium over its debugging pipe: opens a page and tells what it drew, said and asked for."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "the report's tests need Chromium; install it with: apt-get update && apt-get install -y chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
LOADED = "document.readyState == 'complete'"
DRAWN = "[...document.querySelectorAll('[data-chart]')].every(c => c.querySelector('svg path'))"
UNFOLD = """(async () => {
    const filled = (fold) => new Promise(done => {
        const look = () => fold.querySelector('.inside .panels') ? done() : setTimeout(look, 20);
        fold.open = true;
        look();
    });
    await Promise.all([...document.querySelectorAll('details.op')].map(filled));
    document.querySelectorAll('details').forEach(fold => { fold.open = true });
    await new Promise(done => setTimeout(done, 100));
})()"""


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with a fresh profile. `with Browser() as browser: page = browser.open(path, width=390)`."""

    def __enter__(self) -> Browser:
        self.profile = tempfile.mkdtemp()
        to_read, self.to = os.pipe()
        self.source, from_write = os.pipe()

        def wire() -> None:  # Chromium reads commands from 3 and answers on 4
            taken, answers = os.dup(to_read), os.dup(from_write)
            os.dup2(taken, 3)
            os.dup2(answers, 4)

        command = [executable() or "", *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(
            command, preexec_fn=wire, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(from_write)
        self.number, self.rest, self.events = 0, b"", []
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.source)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.source, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\0")
        return json.loads(line)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data) :]
        while True:
            message = self._message()
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Loads a file and waits until it is there (20 seconds at the most)."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        page.dark(dark)
        page.call("Page.navigate", url=path.resolve().as_uri())
        page.until(LOADED)
        return page


class Page:
    """An open page."""

    def __init__(self, browser: Browser, session: str):
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)[
            "result"
        ].get("value")

    def dark(self, on: bool) -> None:
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}],
        )

    def until(self, condition: str, seconds: float = 20) -> bool:
        """Waits until an expression is true in the page; whether it became so in time."""
        end = time.monotonic() + seconds
        while not (true := self.js(f"!!({condition})")) and time.monotonic() < end:
            time.sleep(0.05)
        return true

    def drawn(self) -> bool:
        """Has all charts drawn, as printing does, and waits until each has marks; whether they have."""
        self.js("dispatchEvent(new Event('beforeprint'))")
        return self.until(DRAWN)

    def unfold(self) -> None:
        """Opens every fold, and waits until all hold what they show."""
        self.js(UNFOLD)

    def screenshot(self, whole: bool = False) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def said(self) -> list[str]:
        """Errors on the page's console: exceptions, console.error and what the browser logs as an error."""
        self.js("0")
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, facts = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(
                    facts["exceptionDetails"].get("exception", {}).get("description", facts["exceptionDetails"]["text"])
                )
            elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
                found.append(" ".join(str(a.get("value", a.get("description"))) for a in facts["args"]))
            elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
                found.append(facts["entry"]["text"])
        return found

    def asked(self) -> list[str]:
        """Addresses that the page asked for, but for its own file and data in itself."""
        self.js("0")
        sent = [
            e["params"]["request"]["url"]
            for e in self.browser.events
            if e.get("sessionId") == self.session and e["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent[1:] if not url.startswith(("data:", "blob:"))]
