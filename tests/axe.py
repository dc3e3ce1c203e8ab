"""axe-core on the page that a browser shows: what keeps somebody from using it by keyboard or screen reader."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

from selenium.webdriver import Chrome

GRAVE = ("serious", "critical")
SCRIPT = "axe_playwright_python/axe.min.js"


def axe_findings(chrome: Chrome) -> list[str]:
    """The serious and critical findings: rule, and the elements that break it."""
    chrome.execute_script(Path(str(distribution("axe-playwright-python").locate_file(SCRIPT))).read_text("utf-8"))
    chrome.set_script_timeout(90)  # a long page takes more than the usual 30 s
    violations = chrome.execute_async_script("axe.run().then(arguments[0])")["violations"]
    grave = [one for one in violations if one["impact"] in GRAVE]
    return [f"{one['id']}: {', '.join(str(node['target']) for node in one['nodes'])}" for one in grave]


@contextmanager
def looking(chrome: Chrome, colours: str, width: int) -> Iterator[None]:
    """Look at the page by day (`light`) or by night (`dark`), on a screen so many pixels wide."""
    scheme = [{"name": "prefers-color-scheme", "value": colours}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def each_look(chrome: Chrome) -> list[str]:
    """The findings by day and by night, on a desktop and on a phone, and where the page is wider than its screen."""
    found = []
    for colours in ("light", "dark"):
        for width in (1280, 390):
            with looking(chrome, colours, width):
                wide = chrome.execute_script("return document.documentElement.scrollWidth > innerWidth")
                faults = [*axe_findings(chrome), *["wider than the screen"] * wide]
                found += [f"{colours}, {width} px: {fault}" for fault in faults]
    return found
