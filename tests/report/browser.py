"""Headless Chromium for tests of pages, with access to its logs and requests."""

import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PLOTS = "[...document.querySelectorAll('.plot')]"
WIDTH = "document.documentElement.scrollWidth"


class Browser:
    """Chromium without a window, controlled over its debugging pipe."""

    def __init__(self, profile):
        self.inbox, theirs_out = os.pipe()
        theirs_in, self.outbox = os.pipe()
        quiet = ("background-networking", "component-update", "sync", "gpu", "dev-shm-usage", "extensions")
        flags = ["--headless=new", "--no-sandbox", "--no-first-run", "--remote-debugging-pipe", "about:blank"]
        flags += [f"--user-data-dir={profile}", *(f"--disable-{name}" for name in quiet)]
        wired = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the pipe's numbers are fixed
        self.process = subprocess.Popen(
            ["bash", "-c", wired, "bash", CHROMIUM, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.num, self.rest, self.events, self.session = 0, b"", [], {}
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in pages if one["type"] == "page")
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.terminate()
        self.process.wait(10)
        os.close(self.inbox)
        os.close(self.outbox)

    def call(self, method, **params):
        self.num += 1
        message = {"id": self.num, "method": method, "params": params, **self.session}
        os.write(self.outbox, json.dumps(message).encode() + b"\0")
        while (answer := self.next_message()).get("id") != self.num:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def next_message(self):
        while b"\0" not in self.rest:
            assert select.select([self.inbox], [], [], 30)[0], "the browser does not answer"
            part = os.read(self.inbox, 1 << 20)
            assert part, "the browser has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, path, width, scheme="light"):
        """Open a page, given by its path or address, and wait until its figures are drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        end = time.monotonic() + 15
        while not self.ask(
            f"document.readyState === 'complete' && {PLOTS}.every(p => p.querySelector('.stage > svg'))"
        ):
            assert time.monotonic() < end, "the figures were not drawn"
            time.sleep(0.02)

    def ask(self, expression):
        """Evaluate an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self, page="report.html"):
        """Return the page's log messages and its requests besides the page itself."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
        told = [str(event["params"])[:300] for event in self.events if event["method"] in bad]
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        assert asked[0].endswith(page)
        return told + [url for url in asked[1:] if not url.startswith(("data:", "blob:"))]
