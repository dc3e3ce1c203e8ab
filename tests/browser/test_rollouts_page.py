"""The page of rollouts in a real Chromium: its keys, its looks, and samples whose text wants to be a part of it."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span, write_rollouts
from nanodag.rl.rollouts.rollout_files import Shelf
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.viewer.app import make_app
from tests.chat.fake_api import serving
from tests.rl.rollouts import sampled_span

pytestmark = pytest.mark.slow

HOSTILE = (
    "</pre></span><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<a data-key='e' href='http://127.0.0.1:9/'>x</a>\" onmouseover=\"document.title='owned'\u202e\x1b[2J" + "W" * 5000
)


def ids(text):
    return tuple(text.encode())


def sample(index, *texts, branch=0, **more):
    """Sampled and heard texts in turn."""
    spans = [
        Span(kind="tool", token_ids=ids(text)) if place % 2 else sampled_span(ids(text), [-0.5] * len(ids(text)), 1)
        for place, text in enumerate(texts)
    ]
    return Rollout(
        group_id="p@0", prompt_id=HOSTILE, sample_index=index, branch=branch, spans=(prompt_span(ids("?")), *spans),
        finish_reason="stop", **{"reward": 1.0, **more},
    )  # fmt: skip


@pytest.fixture
def url(tmp_path):
    """Of the page of two steps, each with a sample of a branch, and one that is hostile wherever it can be."""
    folder = tmp_path / "records" / "rollouts"
    folder.mkdir(parents=True)
    save_tokenizer({bytes([value]): value for value in range(256)}, tmp_path)
    named = {"reward_components": {HOSTILE: 1.0}, "role": HOSTILE, "metadata": {HOSTILE: HOSTILE, "answer": HOSTILE}}
    failed = {"reward": None, "metadata": {"reward_error": f"{HOSTILE}\n{HOSTILE}"}}
    for step in (1, 2):
        samples = [sample(0, "first", "long " * 200, "last"), sample(0, "own", branch=1)]
        samples += [sample(1, HOSTILE, HOSTILE, **named), sample(2, HOSTILE, **failed)]
        write_rollouts(folder / f"step-{step:08d}.jsonl", samples)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "event": "step"}\n{"step": 2, "event": "step"}\n')
    shelf = Shelf(run="r", stage="rl", records=tmp_path / "records", metrics=tmp_path / "metrics.jsonl", model=tmp_path)
    with serving(make_app(shelf)) as port:
        yield f"http://127.0.0.1:{port}/"


def press(chrome, keys):
    ActionChains(chrome).send_keys(keys).perform()


def folds(chrome):
    return [fold.get_property("open") for fold in chrome.find_elements(By.TAG_NAME, "details")]


def test_the_page_has_keys_and_two_looks_fits_a_narrow_screen_and_runs_nothing_of_a_sample(chrome, url, tmp_path):
    chrome.get_log("browser")  # what pages of other tests said
    chrome.get(url)
    assert set(folds(chrome)) == {False}
    press(chrome, "e")
    assert set(folds(chrome)) == {True}, "a key of the page's own, not of a sample's link"
    press(chrome, "jj")
    focused = chrome.switch_to.active_element
    assert focused.get_attribute("class") == "sample" and "</pre></span><script>" in focused.text
    for element in focused.find_elements(By.CSS_SELECTOR, "pre span")[:3]:
        ActionChains(chrome).move_to_element(element).perform()
    assert chrome.title == "Rollouts of r, step 2" and chrome.find_elements(By.TAG_NAME, "img") == []
    paper = {}
    for look, width in (("light", 1200), ("dark", 390)):
        chrome.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": look}]}
        )
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        chrome.save_screenshot(str(tmp_path / f"{look}.png"))
        paper[look] = chrome.execute_script(
            "return getComputedStyle(document.querySelector('article')).backgroundColor"
        )
        wide, shown = chrome.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= shown, f"{look}: {wide} of {shown}"
    assert paper["light"] == "rgb(255, 255, 255)" and paper["dark"] == "rgb(23, 28, 37)"
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    press(chrome, "\ue012")  # the arrow to the left
    assert chrome.title == "Rollouts of r, step 1"
    chrome.get(f"{url}?role=no&fate=failed&prompt=%3Cscript%3E")
    assert [entry["message"] for entry in chrome.get_log("browser") if "favicon" not in entry["message"]] == []
