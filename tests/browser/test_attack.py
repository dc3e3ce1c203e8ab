"""A web page of another origin, and one whose name was led to this machine (DNS rebinding), against Prefect's server.

The pages are real ones in a real Chromium, which resolves their names to loopback. Each tries all that it can: to read,
to create a flow run that would leave a file, to open the websocket of events. The UI itself still can.
"""

import http.server
import json
import shutil
import threading

import pytest

from nanodag.server.prefect_api import Api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVIL, REBOUND = "evil.example", "rebound.example"

ATTACK = """
const [url, deployment, done] = arguments;
const found = {};
const tried = async (name, work) => {
  try { found[name] = await work(); } catch (error) { found[name] = `blocked: ${error}`; }
};
const body = JSON.stringify({parameters: {name: 'attack'}, state: {type: 'SCHEDULED', name: 'Scheduled'}});
const create = `${url}/api/deployments/${deployment}/create_flow_run`;
(async () => {
  await tried('read', async () => (await fetch(`${url}/api/csrf-token?client=me`)).status);
  await tried('json', async () =>
    (await fetch(create, {method: 'POST', body, headers: {'Content-Type': 'application/json'}})).status);
  await tried('blob', async () => (await fetch(create, {method: 'POST', body: new Blob([body])})).status);
  await tried('opaque', async () => (await fetch(create, {method: 'POST', mode: 'no-cors', body})).type);
  await tried('token', async () => {
    const token = (await (await fetch(`${url}/api/csrf-token?client=me`)).json()).token;
    const headers = {'Prefect-Csrf-Token': token, 'Prefect-Csrf-Client': 'me', 'Content-Type': 'application/json'};
    return (await fetch(create, {method: 'POST', body, headers})).status;
  });
  await tried('socket', () => new Promise((resolve, reject) => {
    const socket = new WebSocket(`${url.replace('http', 'ws')}/api/events/out`, 'prefect');
    socket.onopen = () => resolve('open');
    socket.onerror = () => reject('refused');
  }));
  done(found);
})();
"""


@pytest.fixture(scope="module")
def page():
    """The port of a web server whose every page is empty."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(scope="module")
def browser(chrome):
    """A Chromium for which the attackers' names mean this machine."""
    from tests.browser.ui import start_chromium

    rules = ", ".join(f"MAP {name} 127.0.0.1" for name in (EVIL, REBOUND))
    made = start_chromium(shutil.which("chromium"), shutil.which("chromedriver"), f"host-resolver-rules={rules}")
    made.set_script_timeout(120)
    yield made
    made.quit()


def num_runs(api):
    return api.ask("POST", "/flow_runs/count", {})


@pytest.fixture
def served(project):
    code, output = project.run("server", "start")
    assert code == 0, output
    return project.server()


def test_a_page_of_another_origin_creates_no_run_and_reads_nothing(served, browser, page):
    url = f"http://127.0.0.1:{served['port']}"
    before = num_runs(Api(url))
    for origin in (f"http://{EVIL}:{page}", f"http://127.0.0.1:{page}"):
        browser.get(origin)
        found = browser.execute_async_script(ATTACK, url, served["deployments"]["speedrun"])
        print(origin, json.dumps(found, indent=1))
        assert found.pop("opaque") == "opaque"  # sent, and refused: what counts is below
        assert {name for name, what in found.items() if not str(what).startswith("blocked")} == set()
    assert num_runs(Api(url)) == before


def test_a_name_that_was_led_here_gets_no_answer_but_a_refusal(served, browser):
    url = f"http://{REBOUND}:{served['port']}"  # the same origin, as the browser sees it
    before = num_runs(Api(f"http://127.0.0.1:{served['port']}"))
    browser.get(f"{url}/api/health")
    assert "Invalid host header" in browser.page_source
    found = browser.execute_async_script(ATTACK, url, served["deployments"]["speedrun"])
    print(json.dumps(found, indent=1))
    refused = {"read": 400, "json": 400, "blob": 400, "opaque": "basic"}
    assert {name: found[name] for name in refused} == refused
    assert found["token"].startswith("blocked") and found["socket"].startswith("blocked")
    assert num_runs(Api(f"http://127.0.0.1:{served['port']}")) == before


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_servers_own_pages_can_do_all_of_it(served, browser, host):
    """The attack itself works where it may: what fails above fails for want of rights."""
    url = f"http://{host}:{served['port']}"
    browser.get(f"{url}/api/health")
    found = browser.execute_async_script(ATTACK, url, served["deployments"]["run_stage"])
    print(json.dumps(found, indent=1))
    assert found["read"] == 200 and found["socket"] == "open"
    assert found["json"] == found["blob"] == 403, "without a token"
    assert found["token"] in (201, 409, 422), "it got as far as the parameters' check"
