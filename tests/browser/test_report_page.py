"""The report of a run in a real Chromium: it fills, keeps what its reader did, and a screen reader can read it."""

import json
import socket

import pytest

from nanodag.viewer.live_page import make_app
from tests.axe import axe_findings, looking
from tests.chat.fake_api import serving
from tests.run_records import run_record, stage_record

pytestmark = pytest.mark.slow

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><a href='javascript:1'>b"
KEYS = {"pretrain": "1" * 40, "rl": "2" * 40}
WAIT_MS = 60_000


class Workspaces:
    """A run whose stages are under way as far as their lines say."""

    def __init__(self, store):
        self._store, self._lines = store, {name: [] for name in KEYS}
        where = {name: {"key": key, "workspace": str(store.local / "work" / key)} for name, key in KEYS.items()}
        entries = {name: stage_record(name, state="running", started=1.0, **at) for name, at in where.items()}
        entries["eval"] = stage_record("eval", inputs={"model": "rl"})
        pipeline = {"stages": {name: {"kind": entry.kind, "note": HOSTILE} for name, entry in entries.items()}}
        about = {"state": "running", "host": socket.gethostname(), "stages": entries, "pipeline": pipeline}
        store.write_run(run_record("r", **about))
        others = {"stages": {**pipeline["stages"], "pretrain": {"kind": "sft"}}}
        store.write_run(run_record("other", **{**about, "pipeline": others}))

    def write(self, name, steps, **more):
        for n in steps:
            about, share = {"step": n, "total": 99, "time": 9.0}, n / 99
            said = {"prompt": HOSTILE, "response": f"<|bos|>{n} {HOSTILE}", "reward": n % 2}
            self._lines[name] += [
                {**about, "event": "step", "loss": 9 / n, "reward": share, **more},
                {**about, "event": "eval", "eval_reward": share},
                {**about, "event": "sample", "responses": [said]},
            ]
        path = self._store.local / "work" / KEYS[name] / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in self._lines[name]))


@pytest.fixture
def workspaces(store):
    made = Workspaces(store)
    made.write("pretrain", range(1, 30))
    return made


def until(chrome, look):
    """Wait until an expression of the page is true."""
    script = (
        "const done = arguments[arguments.length - 1], end = Date.now() + arguments[0];"
        f"(function again() {{ let is_so = false; try {{ is_so = {look}; }} catch {{}}"
        "if (is_so || Date.now() > end) done(is_so); else setTimeout(again, 100); })()"
    )
    chrome.set_script_timeout(90)
    assert chrome.execute_async_script(script, WAIT_MS), f"{look}\n{chrome.find_element('tag name', 'body').text}"


def test_the_page_of_a_run_under_way_fills_and_keeps_what_its_reader_did(chrome, store, workspaces, tmp_path):
    chrome.get_log("browser")
    with serving(make_app(store, ["r"])) as port:
        chrome.get(f"http://127.0.0.1:{port}/")
        until(chrome, "document.querySelector('.plot').drawn")
        until(chrome, "document.querySelector('.news').textContent.startsWith('as of')")
        chrome.execute_script(
            "window.plot = document.querySelector('.plot');"
            "Plotly.relayout(plot, {'xaxis.range': [5, 9], 'xaxis.autorange': false});"
            "document.querySelector('#config details').open = true; scrollTo(0, document.body.scrollHeight);"
            "window.read = [...document.querySelectorAll('tr')].find(one => one.getBoundingClientRect().top > 0);"
        )
        place = "return read.getBoundingClientRect().top"
        was = chrome.execute_script(place)
        workspaces.write("rl", range(1, 6))
        until(chrome, "document.querySelector('#training-rl-reward') !== null")
        workspaces.write("pretrain", range(30, 60))
        until(chrome, "plot.data[0].x.length === 59")
        zoom = "return [plot.isConnected, ...plot.layout.xaxis.range.map(Math.round)]"
        assert chrome.execute_script(zoom) == [True, 5, 9]
        assert chrome.execute_script("return document.querySelector('#config details').open")
        assert abs(chrome.execute_script(place) - was) < 3, "what is read stays where it is, whatever grows above it"
        text = chrome.find_element("id", "samples").text
        assert "5 </script><img" in text and "bos" not in text and "right" in text
        paper = {}
        for look, width in (("light", 1280), ("dark", 390), ("dark", 1280), ("light", 390)):
            with looking(chrome, look, width):
                until(chrome, f"Math.round(plot._fullLayout.width) <= {min(width, 400)}")
                chrome.save_screenshot(str(tmp_path / f"{look}-{width}.png"))
                paper[look] = chrome.execute_script("return plot._fullLayout.font.color")
                wide, shown = chrome.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
                assert wide <= shown, f"{look}: {wide} of {shown}"
                assert axe_findings(chrome) == []
        assert paper == {"light": "#1f2937", "dark": "#e5e7eb"}
        assert (
            chrome.title == "Report of run r"
            and chrome.find_elements("css selector", "main img, main a[href^=java]") == []
        )
        names = chrome.execute_script("return [...document.querySelectorAll('.plot')].map(one => one.ariaLabel)")
        assert "Training loss (nats): loss 9 to 0.1525" in names
    until(chrome, "document.querySelector('.news.old') !== null")
    complaints = [
        entry["message"] for entry in chrome.get_log("browser") if "CONNECTION_REFUSED" not in entry["message"]
    ]
    assert complaints == []


def test_a_stage_that_begins_again_and_a_plot_that_comes_between_leave_the_zoom(chrome, store, workspaces):
    def zoomed(metric, low):
        until(chrome, f"Math.round(document.querySelector('{metric}').layout.xaxis.range[0]) === {low}")

    with serving(make_app(store, ["r"])) as port:
        workspaces.write("rl", range(1, 6))
        chrome.get(f"http://127.0.0.1:{port}/")
        until(chrome, "document.querySelector('.news').textContent.startsWith('as of')")
        for metric, low in (("#training-rl-reward", 2), ("#training-pretrain-gradient-norm", 5)):
            workspaces.write("pretrain", [30], gradient_norm=1.0)
            until(chrome, f"document.querySelector('{metric}') !== null")
            zoom = f"{{'xaxis.range': [{low}, 9], 'xaxis.autorange': false}}"
            chrome.execute_script(
                f"const plot = document.querySelector('{metric}'); draw(plot); Plotly.relayout(plot, {zoom})"
            )
        path = store.local / "work" / KEYS["rl"] / "metrics.jsonl"
        lines = path.read_text()
        path.write_text("")  # as a stage that is built again has it
        until(chrome, "document.querySelector('#training-rl-reward') === null")
        path.write_text(lines)
        zoomed("#training-rl-reward", 2)
        workspaces.write("pretrain", [31], validation_bits_per_byte=2.0)  # a plot before that of the norm
        until(chrome, "document.querySelector('#training-pretrain-validation-bits-a-byte') !== null")
        zoomed("#training-pretrain-gradient-norm", 5)


def test_what_a_reader_unfolded_stays_so_over_a_stop_and_a_resume(chrome, store, workspaces):
    with serving(make_app(store, ["r"])) as port:
        workspaces.write("rl", range(1, 6))
        chrome.get(f"http://127.0.0.1:{port}/")
        until(chrome, "document.querySelector('.news').textContent.startsWith('as of')")
        until(chrome, "document.querySelector('#training-rl-reward') !== null")
        chrome.execute_script("document.querySelector('#Config-rl, #config-rl').open = true")
        for steps, state in ((6, "stopped"), (7, "waiting"), (8, "running")):
            fields = {
                "state": state,
                **({"key": "", "workspace": ""} if state == "waiting" else {}),
            }  # as a resume does
            store.change_run("r", lambda record, fields=fields: record.with_stage("rl", **fields))
            workspaces.write("pretrain", [22 + steps])
            until(chrome, f"document.querySelector('.plot').data[0].x.at(-1) === {22 + steps}")
            assert chrome.execute_script("return document.querySelector('#config-rl').open"), state


def test_runs_are_drawn_over_each_other_on_one_page_with_what_differs(chrome, store, workspaces):
    with serving(make_app(store, ["r", "other"])) as port:
        chrome.get(f"http://127.0.0.1:{port}/")
        until(chrome, "document.querySelector('.plot').drawn")
        lines = chrome.execute_script("return document.querySelector('.plot').data.map(line => line.name)")
        assert list(dict.fromkeys(lines)) == ["r", "other"]
        assert "pretrain.kind" in chrome.find_element("id", "what-differs").text
