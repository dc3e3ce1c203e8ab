"""The chat page in a real Chromium, before a server whose models say what they are told to."""

import json
import re
import subprocess
import sys
import time

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.axe import each_look, looking
from tests.chat.fake_api import FakeApi, serving

pytestmark = pytest.mark.slow

WAIT_S = 20.0


@pytest.fixture(scope="module")
def chat_models(tmp_path_factory):
    """Folders of two tiny random chat models, by name."""
    from tests.evaluation.tiny import save_tiny_model

    folders = {name: tmp_path_factory.mktemp(name) for name in ("first", "second")}
    for seed, folder in enumerate(folders.values()):
        save_tiny_model(folder, "qwen3", seed=seed)
    return folders


class Page:
    """A reader before the page."""

    def __init__(self, chrome, port, folder):
        self.chrome, self.port, self._folder, self._number = chrome, port, folder, 0
        folder.mkdir(exist_ok=True)
        self.load()

    def load(self, *, waits=True):
        self.chrome.get(f"http://127.0.0.1:{self.port}/")
        if waits:
            self.wait(lambda: self.all("#model-0 option"), "the list of models")

    def all(self, selector):
        return [found for found in self.chrome.find_elements(By.CSS_SELECTOR, selector) if found.is_displayed()]

    def one(self, selector):
        (found,) = self.wait(lambda: self.all(selector), selector)
        return found

    def wait(self, look, what, timeout_s=WAIT_S):
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            if time.monotonic() > deadline:
                self.shoot("missing")
                raise AssertionError(f"{what} was not to be seen; {self._folder} shows what was:\n{self.text()}")
            time.sleep(0.05)
        return found

    def wait_for(self, *texts):
        for text in texts:
            self.wait(lambda text=text: text in self.text(), repr(text))

    def text(self):
        return self.js("return document.body.innerText")

    def js(self, code, *arguments):
        return self.chrome.execute_script(code, *arguments)

    def say(self, text, *, waits=True):
        self.one("#question").send_keys(text, Keys.ENTER)
        if waits:
            self.wait_for_end()

    def wait_for_end(self):
        self.wait(lambda: self.all("#send") and not self.all(".writing"), "the end of the answer")

    def press(self, words, place=-1):
        named = f"//button[normalize-space(.)='{words}']"
        found = self.wait(lambda: [b for b in self.chrome.find_elements(By.XPATH, named) if b.is_displayed()], words)
        found[place].click()

    def choose(self, column, model):
        self.js(
            "const [list, name] = arguments; list.value = name; list.dispatchEvent(new Event('change'))",
            self.one(f"#model-{column}"),
            model,
        )

    def tools(self, *names):
        """Offer these tools, and no others."""
        self.press("Settings")
        for box in self.wait(lambda: self.all("#tools input"), "the tools"):
            if box.is_selected() != (box.get_attribute("value") in names):
                box.click()
        self.press("Close")

    def answers(self):
        return [found.text.strip() for found in self.all(".answer .steps")]

    def shoot(self, what):
        self._number += 1
        self.chrome.save_screenshot(str(self._folder / f"{self._number:02d}-{what}.png"))


@pytest.fixture
def api():
    return FakeApi("sft", "rl")


@pytest.fixture
def open_page(chrome, tmp_path):
    """Opens the page of a port; its storage is empty. What broke a rule of the page fails the test."""

    def opened(port):
        chrome.get(f"http://127.0.0.1:{port}/chat/chat.css")
        chrome.execute_script("localStorage.clear(); sessionStorage.clear()")
        chrome.get_log("browser")
        return Page(chrome, port, tmp_path / "pictures")

    yield opened
    complaints = [line["message"] for line in chrome.get_log("browser") if "net::ERR" not in line["message"]]
    chrome.get("about:blank")
    assert [line for line in complaints if "status of 4" not in line] == []


@pytest.fixture
def page(api, open_page):
    with serving(api.app()) as port:
        yield open_page(port)


def test_a_message_is_answered_and_the_conversation_goes_on(page, api):
    page.say("one")
    page.say("two")
    assert page.answers() == ["sft heard one as message 1.", "sft heard two as message 3."]
    page.wait_for("It ended by itself. 6 tokens in")
    assert api.asked[1]["messages"][1] == {"role": "assistant", "content": "sft heard one as message 1. "}
    assert page.one("#conversations .title").text == "one"


def test_an_answer_is_seen_as_it_grows_and_stopped(page, api):
    page.say("long", waits=False)
    page.wait_for("word1 word2")
    first = page.answers()[0]
    page.wait(lambda: len(page.answers()[0]) > len(first), "more words")
    page.shoot("writing")
    page.press("Stop")
    page.wait_for("You stopped it.")
    said = page.answers()[0]
    assert "word399" not in said
    page.wait(lambda: api.num_left == 1, "the server's answer to end")
    page.say("after", waits=True)
    assert api.asked[1]["messages"][1]["content"].startswith("word0 word1"), "what was said stays said"
    page.say("long", waits=False)
    page.wait_for("word1 word2")
    page.one("body").send_keys(Keys.ESCAPE)
    page.wait(lambda: [why.text for why in page.all(".why")][-1] == "You stopped it.", "the second stop")


def test_a_message_is_changed_and_an_answer_made_again(page, api):
    page.say("one")
    page.say("two")
    page.press("Regenerate")
    page.wait_for_end()
    assert len(api.asked) == 3 and api.asked[2] == api.asked[1]
    page.press("Edit", 0)
    field = page.one(".question textarea")
    field.send_keys(" and a half", Keys.ENTER)
    page.wait_for_end()
    assert page.answers() == ["sft heard one and a half as message 1."]
    page.one("#question").send_keys(Keys.ARROW_UP)
    page.one(".question textarea").send_keys(Keys.ESCAPE)
    assert page.all(".question textarea") == [] and len(api.asked) == 4


def test_two_checkpoints_answer_the_same_message_and_each_has_its_own_history(page, api):
    page.say("before")
    page.choose(1, "rl")
    page.say("one")
    page.say("two")
    page.shoot("side-by-side")
    assert page.answers()[-2:] == ["sft heard two as message 5.", "rl heard two as message 5."]
    of_rl = next(body for body in api.asked if body["model"] == "rl" and len(body["messages"]) == 5)
    said = [message["content"] for message in of_rl["messages"] if message["role"] == "assistant"]
    assert said == ["sft heard before as message 1. ", "rl heard one as message 3. "]
    left, right = (column.rect for column in page.all(".turn:last-child .answer"))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]


def test_a_call_is_shown_carried_out_and_its_result_folded(page, api):
    page.say("sum")
    assert "It is 408." in page.answers()[0]
    call = page.one(".call")
    assert "calculator" in call.text and "12*34" in call.text
    folded = page.js("return document.querySelector('.call details')")
    assert not folded.get_property("open")
    page.one(".call summary").click()
    assert page.one(".call details pre").text == "408"
    page.shoot("call")
    asked, answered = api.asked[1]["messages"][1:]
    assert asked["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"expression": "12*34"}'}
    assert answered == {"role": "tool", "tool_call_id": "call-1", "content": "408"}
    page.say("next")
    assert [m["role"] for m in api.asked[2]["messages"]] == ["user", "assistant", "tool", "assistant", "user"]


def test_a_program_runs_in_the_sandbox(page):
    page.tools("calculator", "python")
    page.say("program")
    assert "It is 45." in page.answers()[0]


def test_a_model_that_calls_without_end_is_ended(page, api):
    page.say("loop")
    page.wait_for("Ended: it called tools too often.")
    assert len(api.asked) == 9
    assert len(page.all(".call")) == 9


def test_a_model_that_knows_no_tools_is_asked_without_them_and_the_page_says_so(open_page):
    api = FakeApi("plain")
    with serving(api.app()) as port:
        page = open_page(port)
        page.say("one")
        page.wait_for("It was asked without tools: plain knows no tools")
        assert "tools" in api.asked[0] and "tools" not in api.asked[1]


def test_what_a_model_writes_cannot_act(page):
    page.say("markup")
    page.wait_for("<script>window.owned = 1</script>")
    page.wait(lambda: page.all(".text pre"), "the code")
    page.shoot("markup")
    assert page.js("return window.owned") is None
    assert page.js("return document.querySelectorAll('#talk script, #talk img, #talk [onerror]').length") == 0
    links = page.js("return [...document.querySelectorAll('.text a')].map((a) => [a.href, a.rel])")
    safe = "noopener noreferrer nofollow"
    assert links == [["https://example.org/", safe], ["https://example.org/a.png", safe]]
    page.js("document.querySelector('.text').innerHTML = '<img src=x onerror=\"window.owned = 5\">'")
    time.sleep(0.3)
    assert page.js("return window.owned") is None, "the page's policy is the second wall"
    assert any("Content Security Policy" in line["message"] for line in page.chrome.get_log("browser"))


def test_conversations_and_settings_outlive_a_reload(page, api):
    page.say("first")
    page.press("New conversation")
    page.press("Settings")
    page.one("[name=system]").send_keys("Be brief.")
    page.one("[name=temperature]").clear()
    page.one("[name=temperature]").send_keys("0.25")
    page.press("Close")
    page.say("second")
    page.load()
    assert [title.text for title in page.all("#conversations .title")] == ["second", "first"]
    assert page.answers() == ["sft heard second as message 2."]
    page.wait(lambda: page.all(".text p"), "rendered Markdown")
    page.say("third")
    assert api.asked[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert api.asked[-1]["temperature"] == 0.25
    page.press("first")
    assert page.answers() == ["sft heard first as message 1."]


def test_an_answer_that_a_reload_interrupts_says_so_and_is_kept(page):
    page.say("long", waits=False)
    page.wait_for("word3 word4")
    page.load()
    page.wait_for("Interrupted: the page was closed or loaded again.", "word3 word4")


def test_probabilities_are_shown_under_the_mouse_and_by_keys(page):
    page.say("one")
    page.press("Probabilities")
    tokens = page.all(".token")
    assert [token.text.strip() for token in tokens[:3]] == ["sft", "heard", "one"]
    page.js("arguments[0].focus()", tokens[0])
    assert "98.0 %" in page.one("#hint").text
    tokens[0].send_keys(Keys.ARROW_RIGHT)
    hint = page.one("#hint").text
    assert "heard␣" in hint and "60.0 %" in hint and "␣other" in hint and "20.0 %" in hint
    assert page.js("return document.activeElement.getAttribute('aria-describedby')") == "hint"
    page.shoot("probabilities")
    page.press("Probabilities")
    assert page.all(".token") == [] and page.all("#hint") == []


def test_thoughts_are_folded_above_what_is_said(page):
    page.say("think")
    assert page.one(".thought").text == "Thoughts"
    assert page.one(".text").text == "Easy."
    page.one(".thought summary").click()
    assert page.one(".thought").text == "Thoughts\nIt is easy."


def test_why_an_answer_ended_is_told(page):
    page.say("cut")
    page.wait_for("Cut off: it is as long as an answer may be.")


def test_what_has_no_room_in_the_context_is_left_out_and_the_page_says_so(page, api):
    page.say("one")
    page.say("full")
    page.wait_for("The context was full: the oldest exchange was left out.")
    assert page.answers()[-1] == "sft heard full as message 1."


def test_a_server_that_goes_in_the_middle_of_an_answer_is_told_and_asked_again(page):
    page.say("lost")
    page.wait_for("sft heard", "The server was lost.")
    page.press("Regenerate")
    page.wait_for_end()
    page.say("one")
    page.wait_for("sft heard one as message")


def test_a_server_that_is_gone_and_comes_back_is_mended_without_a_reload(api, open_page):
    with serving(api.app()) as port:
        page = open_page(port)
        page.say("one")
    page.js("window.same = true")
    page.say("two")
    page.wait_for("The server was lost.", "The server does not answer.")
    page.shoot("gone")
    with serving(FakeApi("sft", "newer").app(), port=port):
        page.wait(lambda: not page.all("#notice"), "the notice to go")
        assert [option.text for option in page.all("#model-0 option")] == ["sft", "newer"]
        page.press("Regenerate")
        # Not `wait_for_end`: the page asks for its models first, and has not begun to write then.
        page.wait(lambda: page.answers()[-1:] == ["sft heard two as message 3."], "the whole answer")
        assert page.js("return window.same")


def test_checkpoints_that_are_served_answer_side_by_side_with_their_probabilities(open_page, chat_models):
    """The whole of it: `nanodag serve`'s process with two engines, and the page."""
    named = [f"--model={name}={folder}" for name, folder in chat_models.items()]
    command = [sys.executable, "-m", "nanodag.chat.web", *named, "--port=0", "--device=cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline()
            page = open_page(int(re.search(r"http://127.0.0.1:(\d+)/v1", said).group(1)))
            page.choose(1, "second")
            page.one("#open-settings").click()
            page.one("[name=max_tokens]").send_keys(Keys.BACKSPACE * 3, "12")
            page.press("Close")
            page.say("the cat")
            page.shoot("real")
            assert len(page.answers()) == 2 and len(set(page.answers())) == 2
            assert page.text().count(" tokens in ") == 2
            page.press("Probabilities", 0)
            page.js("document.querySelector('.token').focus()")
            chances = [float(text) for text in re.findall(r"([0-9.]+) %", page.one("#hint").text)]
            assert len(chances) == 6 and chances[1:] == sorted(chances[1:], reverse=True)
            page.say("and then")
            assert "failed" not in page.text()
        finally:
            process.terminate()


PROMPTS = ["Sort: 2 1", "<b>\u202eReverse"]
ALONE = {"run": "pocket-1", "prompts": PROMPTS, "has_turns": False, "has_calls": False}
ABOUT = {"rl": ALONE | {"stage": "rl"}, "sft": ALONE | {"stage": "sft"}}


@pytest.fixture
def rated(tmp_path):
    """Where the models of one run, which saw neither conversations nor tools, keep their ratings."""
    return tmp_path / "ratings" / "pocket-1"


@pytest.fixture
def of_run(rated):
    return FakeApi("rl", "sft", "plain", about=ABOUT, ratings=rated)


@pytest.fixture
def run_page(of_run, open_page):
    with serving(of_run.app()) as port:
        yield open_page(port)


def test_a_model_is_named_tried_with_its_pipelines_prompts_and_asked_as_it_was_trained(run_page, of_run):
    page = run_page
    assert page.js("return document.activeElement.id") == "question"
    page.wait(lambda: page.chrome.title == "rl of pocket-1 · nanodag chat", "the title")
    assert page.one("#about").text == "rl of pocket-1"
    assert [button.text for button in page.all(".prompts button")] == PROMPTS
    page.press("Sort: 2 1")
    page.wait_for_end()
    page.say("two")
    assert [m["content"] for m in of_run.asked[1]["messages"]] == ["two"] and "tools" not in of_run.asked[1]
    page.wait_for("rl was trained on single questions: each message is sent alone.", "It was asked alone")
    page.press("Send the whole conversation")
    page.say("three")
    assert len(of_run.asked[2]["messages"]) == 5 and not page.all("#alone")
    page.press("Settings")
    page.one("[name=unseenTools]").click()
    page.press("Close")
    page.say("sum")
    assert "It is 408." in page.answers()[-1]
    log = page.js("return [...document.querySelectorAll('#read-out p')].map((line) => line.textContent)")
    assert log[0] == "rl heard Sort: 2 1 as message 1. It ended by itself." and "It is 408." in log[-1]


def test_a_link_puts_two_stages_side_by_side_each_with_its_system_prompt_and_the_better_answer_is_a_pair(
    run_page, of_run, rated
):
    page = run_page
    page.chrome.get(f"http://127.0.0.1:{page.port}/?model=sft&beside=rl")
    page.wait(lambda: page.chrome.title == "sft beside rl of pocket-1 · nanodag chat", "the title")
    page.press("Settings")
    page.one("[name=system]").send_keys("Be brief.")
    page.press("Close")
    page.say("one")
    asked = {body["model"]: [message["role"] for message in body["messages"]] for body in of_run.asked}
    assert asked == {"sft": ["system", "user"], "rl": ["user"]}
    page.press("Better")
    page.wait_for("Kept: 1 in ")
    page.press("Better", 0)
    page.wait(lambda: page.all(".answer:first-child [aria-pressed=true]"), "the other one")
    page.press("Bad")
    page.wait(lambda: (rated.parent / "pocket-1.thumbs.jsonl").exists(), "the thumb")
    page.load()
    assert [b.text for b in page.all(".rating [aria-pressed=true]")] == ["Better", "Bad"]
    (row,) = map(json.loads, (rated.parent / "pocket-1.pairs.jsonl").read_text().splitlines())
    assert row["prompt"] == [{"role": "user", "content": "one"}] and row["models"] == ["pocket-1:sft", "pocket-1:rl"]
    assert row["chosen"][0]["content"].startswith("sft heard one")
    page.press("Better", 0)
    page.wait(lambda: (rated.parent / "pocket-1.pairs.jsonl").read_text() == "", "the pair to be taken back")
    page.chrome.get(f"http://127.0.0.1:{page.port}/?model=%3Cimg%20src%3Dx%3E")
    page.wait_for("The link's <img src=x> is not served here.")


def test_conversations_are_searched_and_exported(page):
    for text in ("apples", "pears"):
        page.press("New conversation")
        page.say(text)
    page.one("#search").send_keys("heard APPLES")
    assert [title.text for title in page.all("#conversations .title")] == ["apples"]
    page.js("URL.createObjectURL = (blob) => (blob.text().then((text) => window.exported = text), '#')")
    page.press("Export what was found")
    exported = json.loads(page.wait(lambda: page.js("return window.exported"), "the export"))
    assert [one["title"] for one in exported["conversations"]] == ["apples"]
    assert exported["conversations"][0]["turns"][0]["answers"][0]["finish"] == "stop"
    page.one("#search").send_keys("no")
    assert page.one("#found").text == "0 of 2 found" and not page.one("#export").is_enabled()


def test_hostile_names_and_lines_of_300_kb_neither_act_nor_widen_the_page(open_page, rated):
    name = "</script>\u202e<img src=x onerror='window.owned=1'>" + "N" * 300
    api = FakeApi(name, "b", about={name: ALONE | {"run": name, "stage": name}}, ratings=rated)
    with serving(api.app()) as port:
        page = open_page(port)
        page.choose(1, "b")
        page.say("hostile")
        page.wait(lambda: len(page.answers()[0]) > 300_000 and page.answers()[0].endswith("end"), "the long line")
        page.press("Good", 0)
        page.wait_for("The rating was not kept")
        assert not page.all(".rating [aria-pressed=true]"), "what was not kept does not look so"
        assert page.js("return [window.owned, document.images.length]") == [None, 0]
        for width in (1280, 390):
            with looking(page.chrome, "light", width):
                wide, shown = page.js("return [document.documentElement.scrollWidth, innerWidth]")
                assert wide <= shown


def test_two_tabs_keep_their_own_conversations_and_see_each_others(page):
    page.say("first")
    first = page.chrome.current_window_handle
    page.chrome.switch_to.new_window("tab")
    try:
        page.load()
        page.press("New conversation")
        page.say("second")
        page.chrome.switch_to.window(first)
        page.say("third")
        page.wait(lambda: len(page.all("#conversations .title")) == 2, "the other tab's conversation")
        assert page.answers()[-1] == "sft heard third as message 3."
    finally:
        for handle in page.chrome.window_handles:
            if handle != first:
                page.chrome.switch_to.window(handle)
                page.chrome.close()
        page.chrome.switch_to.window(first)


def test_axe_finds_nothing_grave_on_the_chat_page(run_page):
    page = run_page
    page.wait(lambda: page.all(".prompts button"), "the prompts")
    assert each_look(page.chrome) == []
    page.choose(1, "sft")
    page.say("page")
    page.say("think")
    page.one("#search").send_keys("page")
    assert each_look(page.chrome) == []
    page.press("Settings")
    assert each_look(page.chrome) == []


def test_a_key_is_asked_for_and_kept_for_this_tab_alone(open_page, chrome):
    api = FakeApi("sft", key="secret")
    with serving(api.app()) as port:
        chrome.get(f"http://127.0.0.1:{port}/chat/chat.css")
        chrome.execute_script("localStorage.clear(); sessionStorage.clear()")
        chrome.get(f"http://127.0.0.1:{port}/")
        page = Page.__new__(Page)
        page.chrome, page.port = chrome, port
        page.wait(lambda: page.all("#key"), "the question for a key")
        page.one("#key input").send_keys("wrong", Keys.ENTER)
        page.wait_for("The server refuses the key.")
        page.wait(lambda: page.all("#key"), "the question for a key")
        page.one("#key input").send_keys("secret", Keys.ENTER)
        page.wait(lambda: page.all("#model-0 option") and not page.all("#notice"), "the models")
        page.say("one")
        assert page.answers() == ["sft heard one as message 1."]
        assert "secret" not in page.js("return JSON.stringify(localStorage)")


def test_a_full_storage_gives_up_probabilities_first_and_then_says_so(page):
    page.say("old")
    page.press("New conversation")
    fill = """
      let size = arguments[0];
      localStorage.setItem('filler', '');
      while (size >= 1) {
        try { localStorage.setItem('filler', localStorage.getItem('filler') + 'x'.repeat(size)); }
        catch { size = Math.floor(size / 2); }
      }
    """
    page.js(fill, 1 << 20)
    page.say("new")
    kept = page.js("return Object.entries(localStorage).filter(([name]) => name.startsWith('nanodag.chat/'))")
    by_title = {found["title"]: found for found in (json.loads(value) for _, value in kept)}
    assert by_title["old"]["turns"][0]["answers"][0]["steps"][0]["tokens"] == []
    assert "sft heard old" in by_title["old"]["turns"][0]["answers"][0]["steps"][0]["text"]
    page.js(fill, 1 << 20)
    page.say("more")
    page.wait_for("The browser's storage is full")
    assert page.answers()[-1] == "sft heard more as message 3."


def test_a_phone_has_all_of_it_within_its_width(page):
    page.chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        page.load()
        page.say("page")
        page.choose(1, "rl")
        page.say("page")
        page.shoot("phone")
        assert page.js("return document.documentElement.scrollWidth") <= 390
        first, second = (answer.rect for answer in page.all(".turn:last-child .answer"))
        assert second["y"] > first["y"], "one above the other"
        assert page.all("#conversations") == []
        page.one("#open-shelf").click()
        page.wait(lambda: page.all("#conversations .title"), "the list")
        time.sleep(0.3)
        page.shoot("phone-list")
        page.one("body").send_keys(Keys.ESCAPE)
        page.wait(lambda: not page.all("#conversations"), "the list to go")
    finally:
        page.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_colours_follow_the_system_and_the_choice_and_are_told_apart(page):
    """WCAG AA: 4.5 to 1 for text."""
    page.say("page")
    page.wait(lambda: page.all(".text table"), "the page")
    for scheme in ("light", "dark"):
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        page.shoot(f"looks-{scheme}")
        low = page.js(CONTRASTS)
        assert low == []
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.one("#theme").click()
    page.one("#theme").click()
    assert page.js("return getComputedStyle(document.body).colorScheme") == "dark"
    page.load()
    assert page.js("return getComputedStyle(document.body).colorScheme") == "dark"


# Texts whose contrast with what lies behind them is below 4.5.
CONTRASTS = """
const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0.5) return c;
  }
  return [255, 255, 255];
};
return [...document.querySelectorAll('body *')]
  .filter((e) => e.offsetParent && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .map((e) => {
    const [a, b] = [luminance(numbers(getComputedStyle(e).color)), luminance(behind(e))];
    return [e.tagName, e.className, e.textContent.slice(0, 30), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  })
  .filter((row) => row[3] < 4.5);
"""


def test_every_control_has_a_name_and_can_be_reached_by_keys(page):
    page.say("page")
    nameless = """
      return [...document.querySelectorAll('button, input, select, textarea')].filter((e) => e.offsetParent)
        .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML);
    """
    assert page.js(nameless) == []
    reached = []
    page.js("document.activeElement.blur()")
    for _ in range(25):
        page.chrome.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.js("const e = document.activeElement; return e.id || e.textContent.trim()"))
    for name in ("begin", "page", "model-0", "model-1", "open-settings", "Edit", "Regenerate", "question", "send"):
        assert name in reached, reached
