"""The page of rollouts in a real Chromium: its keys, its looks, and samples whose text wants to be a part of it."""

import json

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span, write_rollouts
from nanodag.rl.rollouts.rollout_files import Shelf
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.viewer.app import make_app
from tests.axe import each_look, looking
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
        samples += [sample(index, "the same") for index in (3, 4, 5)] + [sample(6, "the same", reward=0.0)]
        write_rollouts(folder / f"step-{step:08d}.jsonl", samples)
    lines = [{"step": step, "event": "step", "reward": reward} for step, reward in ((1, 0.25), (2, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
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
        with looking(chrome, look, width):
            chrome.save_screenshot(str(tmp_path / f"{look}.png"))
            paper[look] = chrome.execute_script(
                "return getComputedStyle(document.querySelector('article')).backgroundColor"
            )
            wide, shown = chrome.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide <= shown, f"{look}: {wide} of {shown}"
    assert paper["light"] == "rgb(255, 255, 255)" and paper["dark"] == "rgb(23, 28, 37)"
    press(chrome, "\ue012")  # the arrow to the left
    assert chrome.title == "Rollouts of r, step 1"
    chrome.get(f"{url}?role=no&fate=failed&prompt=%3Cscript%3E")
    assert [entry["message"] for entry in chrome.get_log("browser") if "favicon" not in entry["message"]] == []


def test_equal_answers_are_folded_and_the_rest_found_pointed_at_linked_and_clicked_on(chrome, url):
    chrome.get(url)
    assert [fold.text for fold in chrome.find_elements(By.CSS_SELECTOR, ".same > summary")] == [
        "2 more samples are the same"
    ], "another reward is no equal answer"
    press(chrome, "t")
    hint = chrome.find_element(By.ID, "hint")
    assert "probability 0.607" in hint.text and chrome.switch_to.active_element.text == "f"
    press(chrome, "\ue014")
    assert chrome.switch_to.active_element.text == "i" and hint.is_displayed()
    press(chrome, "\ue00c")
    assert chrome.switch_to.active_element.get_attribute("class") == "sample" and not hint.is_displayed()
    chrome.get(f"{url}?text=OWNED")
    assert "2 of 8 rollouts" in chrome.find_element(By.TAG_NAME, "nav").text
    assert chrome.execute_script("return CSS.highlights.get('found').size") > 2
    link = chrome.find_elements(By.CSS_SELECTOR, ".share a")[0].get_attribute("href")
    chrome.get(link)
    samples = chrome.find_elements(By.CLASS_NAME, "sample")
    assert len(samples) == 1 and "sample\n1" in samples[0].text
    first = chrome.find_elements(By.CSS_SELECTOR, ".curve a")[0]
    ActionChains(chrome).move_to_element(first).click().perform()
    assert chrome.title == "Rollouts of r, step 1"


def test_axe_finds_nothing_grave_on_the_page_of_rollouts(chrome, url):
    chrome.get(url)
    press(chrome, "e")
    assert each_look(chrome) == []
    chrome.get(f"{url}?step=9")
    assert each_look(chrome) == []
