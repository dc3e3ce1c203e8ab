"""Who hears of a run that failed, and what nobody gets to see."""

import logging

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock

import tasks.notify
from flows.speedrun import speedrun
from nanodag.config.pipeline import NotifyConfig
from nanodag.errors import ConfigError, ServerBusy, ServerError
from nanodag.run.notifications import MAX_TEXT, notice, post
from nanodag.store import Store
from tests.http_server import listening


@pytest.fixture
def fails(prefect_server, project, tell, monkeypatch):
    """Have a run fail that tells this webhook of it; HOOK is this address."""
    monkeypatch.setattr(tasks.notify, "PAUSES_S", (0.0, 0.0))

    def run(webhook, hook=""):
        monkeypatch.setenv("HOOK", hook)
        tell("sft", "fail")
        state = speedrun("main-1", overrides=[f"notify.webhook={webhook}"], return_state=True)
        assert state.is_failed() and "sft was told to fail" in state.message
        tell("sft", "")

    return run


def test_a_run_that_fails_is_told_of_and_its_address_is_in_no_log_and_no_record(project, fails, caplog):
    caplog.set_level(logging.DEBUG)
    with listening() as (url, posted):
        fails("env:HOOK", f"{url}/hooks/secret")
        assert speedrun("main-1", overrides=["notify.webhook=env:HOOK"], return_state=True).is_completed()
    (told,) = posted
    assert (told["flow"], told["run"], told["state"]) == ("speedrun", "main-1", "Failed")
    assert told["text"].startswith("nanodag speedrun main-1: Failed\nStage sft failed: ")
    assert "nanodag status main-1" in told["text"]
    assert "secret" not in caplog.text and "secret" not in Store(project / "store").read_run("main-1").model_dump_json()


def test_a_webhook_that_is_down_leaves_the_run_as_it_ended(project, fails, caplog):
    fails("env:HOOK", "http://127.0.0.1:1/hooks/secret")
    assert "Nobody was told that this run failed: notify.webhook: the address in HOOK cannot be reached" in caplog.text
    assert "secret" not in caplog.text
    assert Store(project / "store").read_run("main-1").state == "failed"


def test_a_block_of_prefects_is_told(fails):
    with listening() as (url, posted):
        block = CustomWebhookNotificationBlock(name="x", url=f"{url}/hook", json_data={"it": "{{subject}}: {{body}}"})
        block.save("team", overwrite=True, _sync=True)
        fails("block:custom-webhook/team")
    assert posted[0]["it"].startswith("nanodag main-1: nanodag speedrun main-1: Failed\nStage sft failed: ")


@pytest.mark.parametrize(("status", "num_tries"), [(200, 1), (302, 1), (403, 1), (429, 3), (500, 3)])
def test_a_webhook_is_asked_again_only_where_that_may_help(status, num_tries, monkeypatch):
    monkeypatch.setattr(tasks.notify, "PAUSES_S", (0.0, 0.0))
    with listening(status) as (url, posted):
        monkeypatch.setenv("HOOK", f"{url}/hooks/secret")
        if status == 200:
            tasks.notify.send("env:HOOK", {"text": "failed"})
        else:
            with pytest.raises(ServerError, match=f"the address in HOOK answered {status}") as caught:
                tasks.notify.send("env:HOOK", {"text": "failed"})
            assert "secret" not in str(caught.value)
    assert posted == num_tries * [{"text": "failed"}]


@pytest.mark.parametrize(
    ("address", "may_pass"),
    [("http://127.0.0.1:1/secret", True), ("htp://127.0.0.1/secret", False), ("http://127.0.0.1:secret/", False)],
)
def test_an_address_that_is_not_there_is_named_by_its_variable(address, may_pass, monkeypatch):
    monkeypatch.setenv("HOOK", address)
    with pytest.raises(ServerError, match="the address in HOOK cannot be reached") as caught:
        post("env:HOOK", {})
    assert isinstance(caught.value, ServerBusy) == may_pass and "secret" not in str(caught.value)


def test_a_variable_that_is_not_set_is_named_and_an_address_in_the_config_is_refused(monkeypatch):
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(ConfigError, match="HOOK is not set where the flows are served"):
        post("env:HOOK", {})
    with pytest.raises(ValueError, match="write env:NAME"):
        NotifyConfig(webhook="https://hooks.example.org/secret")
    with pytest.raises(ValueError, match="neither none, env:NAME nor block:TYPE/NAME"):
        NotifyConfig(webhook="slack")


def test_a_long_message_is_cut_and_still_says_where_to_look():
    text = notice(flow="sweep", run="s", state="Crashed", message="x" * 9000, look="http://h/1")["text"]
    assert len(text) < MAX_TEXT + 100 and text.endswith("Look: nanodag status s, or http://h/1")
