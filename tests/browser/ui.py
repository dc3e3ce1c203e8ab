"""Prefect's pages, as somebody who clicks sees them: a headless Chromium, and a screenshot of every step."""

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

WAIT_S = 180.0
MENU = "//button[.//span[normalize-space(.)='Open menu']]"
DIALOG = "//*[@role='alertdialog' or @role='dialog']"


def start_chromium(chromium: str, driver: str, *more: str) -> Chrome:
    """A Chromium without a window that calls nobody but the page it is told to open. more: arguments of its own."""
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in (
        *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-proxy-server"),
        *("window-size=1400,1000", "disable-background-networking", "disable-component-update", "disable-sync"),
        *("no-first-run", "disable-default-apps", "disable-extensions"),
        *more,
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})  # what a page complains of can be asked for
    return Chrome(options=options, service=Service(driver))


class Ui:
    """One user before the pages at `url`. Screenshots go to `folder`, numbered in the order of the steps."""

    def __init__(self, chrome: Chrome, url: str, folder: Path) -> None:
        self._chrome, self._url, self._folder = chrome, url, folder
        self._numbers = itertools.count(1)
        folder.mkdir(parents=True, exist_ok=True)

    def open_run(self, flow_run: str) -> None:
        self._chrome.get(f"{self._url}/v2/runs/flow-run/{flow_run}")
        self.find(MENU)

    def state(self) -> str:
        """The state that stands at the head of a run's page."""
        return self.find("//*[@data-slot='badge']").text.strip()

    def wait_for_state(self, state: str, timeout_s: float = WAIT_S) -> None:
        self._wait(lambda: self.state() == state or None, f"state {state}", timeout_s)

    def tasks(self) -> list[tuple[str, str]]:
        """Name and state of every task of the run whose page is open, the newest first."""
        self.click("//*[@role='tab' and contains(., 'Task Runs')]")
        panel = "//*[@role='tabpanel' and not(@hidden)]"
        self._wait(lambda: "Items per page" in self.find(panel).text or None, "the list of tasks")
        return re.findall(r"^(\S+)\n(\w+)\n\d{4}/", self.find(panel).text, re.MULTILINE)

    def open_form(self, deployment: str) -> None:
        self._chrome.get(f"{self._url}/v2/deployments/deployment/{deployment}/run")
        self.find("//button[@type='submit' and normalize-space(.)='Submit']")

    def find(self, xpath: str) -> WebElement:
        """The first element that is shown; waits for it."""
        return self._wait(
            lambda: next((e for e in self._chrome.find_elements(By.XPATH, xpath) if e.is_displayed()), None), xpath
        )

    def click(self, xpath: str) -> None:
        self._wait(lambda: self._clicked(xpath), xpath)

    def choose(self, item: str) -> None:
        """Open the page's menu and click one of its items."""
        self.click(MENU)
        self.click(f"//*[@role='menuitem' and contains(normalize-space(.), '{item}')]")

    def confirm(self, button: str) -> None:
        """Click a button of the dialog that is open."""
        self.click(f"{DIALOG}//button[normalize-space(.)='{button}']")

    def wait_for_text(self, *texts: str) -> None:
        """Wait until the page shows each of these."""
        for text in texts:
            self._wait(lambda text=text: text in self.text() or None, text)

    def text(self) -> str:
        return self._chrome.find_element(By.TAG_NAME, "body").text

    def field(self, label: str) -> str:
        """XPath of the part of a form that holds a parameter."""
        return f"//label[starts-with(normalize-space(.), '{label}')]/ancestor::div[3]"

    def fill(self, xpath: str, text: str) -> None:
        field = self.find(xpath)
        field.clear()
        field.send_keys(text)

    def shoot(self, what: str) -> Path:
        """Keep a picture of what is to be seen now."""
        path = self._folder / f"{next(self._numbers):02d}-{what}.png"
        self._chrome.save_screenshot(str(path))
        return path

    def _clicked(self, xpath: str) -> bool | None:
        for element in self._chrome.find_elements(By.XPATH, xpath):
            if element.is_displayed() and element.is_enabled():
                element.click()
                return True
        return None

    def _wait(self, look: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if (found := look()) is not None:
                    return found
            except (StaleElementReferenceException, ElementClickInterceptedException):
                pass  # the page was drawn again meanwhile
            time.sleep(0.3)
        self.shoot("missing")
        raise AssertionError(
            f"{what!r} was not to be seen within {timeout_s:.0f} s; {self._folder} shows what was:\n{self.text()}"
        )
