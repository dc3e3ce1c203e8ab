"""The page of rollouts: what became of each, filters, colours, and that nothing in them is taken for markup."""

import json
import re
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from nanodag.cli.rollouts import print_rollouts
from nanodag.data.picture_problems import count_shapes
from nanodag.errors import ArtifactNotFound
from nanodag.host.images import FOLDER, ImageLayout, keep, keep_beside
from nanodag.rl.rollouts.rollout import Rollout, Span, prompt_span, write_rollouts
from nanodag.rl.rollouts.rollout_files import Read, Shelf, Wanted, shelf_of
from nanodag.store import Store
from nanodag.tokenizer.bpe import save_tokenizer
from nanodag.tokenizer.encoding import Encoding
from nanodag.viewer.app import make_app, serve, together
from nanodag.viewer.sample_view import LAST_LINES, first_samples, groups_of, text_of
from tests.rl.rollouts import sampled_span
from tests.run_records import run_record, stage_record

A, B, C, LESS = ord("a"), ord("b"), ord("c"), ord("<")


def rollout(group, index, reward, spans, prompt="?", **more):
    more = {"finish_reason": "stop", **more}
    spans = (prompt_span(list(prompt.encode())), *spans)
    return Rollout(group_id=f"{group}@0", prompt_id=group, sample_index=index, reward=reward, spans=spans, **more)


def append_ledger(records, prompt, outcome, reason):
    line = {"step": 2, "epoch": 0, "prompt_id": prompt, "outcome": outcome, "reason": reason}
    with (records / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def shelf(tmp_path):
    """One step: a group of two that was trained, one that was dropped for its spread, one whose reward failed."""
    records = tmp_path / "records"
    folder = records / "rollouts"
    folder.mkdir(parents=True)
    save_tokenizer({bytes([value]): value for value in range(256)}, tmp_path)
    tool = Span(kind="tool", token_ids=(C,))
    trained = [
        rollout("right", 0, 1.0, [sampled_span([A, B], [-0.5, -0.25], 3)]),
        rollout("right", 1, 0.0, [sampled_span([LESS], [-1.0], 3), tool, sampled_span([B], [-2.0], 4)]),
    ]
    dropped = [rollout("same", 0, 0.5, [sampled_span([A], [-0.1], 3)])]
    failed = [rollout("broken", 0, None, [sampled_span([B], [-0.1], 3)], metadata={"reward_error": "it raised <b>"})]
    write_rollouts(folder / "step-00000002.jsonl", trained)
    write_rollouts(folder / "step-00000002.dropped.jsonl", failed + dropped)
    write_rollouts(folder / "eval-00000002.jsonl", trained[:1])
    (folder / "step-00000002.answers.jsonl").write_text(json.dumps({"prompt_id": "right", "answer": "a < b"}) + "\n")
    (folder / "eval-00000002.answers.jsonl").write_text(json.dumps({"prompt_id": "right", "answer": "held"}) + "\n")
    scores = {"advantages": [0.5, 0.5], "differences": [0.01, -0.02]}
    others = {"advantages": [-2.0, None, -2.0], "differences": [0.0, None, 0.03]}
    for index, (one, cut) in enumerate(((scores, ""), (others, '{"cut": '))):
        line = {"group_id": "right@0", "sample_index": index, "branch": 0, **one}
        (folder / f"step-00000002.scores-{index}.jsonl").write_text(f"{json.dumps(line)}\n{cut}")
    append_ledger(records, "right", "trained", "")
    append_ledger(records, "same", "dropped", "zero_spread")
    spans = [["generate", 100.0, 101.5], ["trainer_waits", 100.0, 101.5], ["train", 101.5, 102.0]]
    (records / "timeline.jsonl").write_text(json.dumps({"step": 2, "spans": spans}) + "\n")
    metrics = [{"event": "step", "step": 2, "total": 2, "reward": 0.5}, {"event": "eval", "step": 2, "eval_reward": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return Shelf(run="r", stage="rl", records=records, metrics=tmp_path / "metrics.jsonl", model=tmp_path)


def client_of(shelf, base_url="http://127.0.0.1", **how):
    return TestClient(make_app(shelf), base_url=base_url, **how)


@pytest.fixture
def get(shelf):
    client = client_of(shelf)
    return lambda query="": client.get(f"/{query}")


def test_each_rollout_says_what_became_of_it(shelf):
    fates = {read.rollout.prompt_id: read.fate for read in shelf.read(2)}
    assert fates == {"right": "trained", "same": "zero_spread", "broken": "reward_failed"}


def test_a_sample_has_failed_where_it_has_no_reward_whatever_became_of_its_group(shelf):
    def dropped(prompt, reason):
        failed = rollout(prompt, 0, None, [said("a")])
        broken = replace(failed, sample_index=1, finish_reason="error", spans=failed.spans[:1])
        append_ledger(shelf.records, prompt, "dropped", reason)
        return [failed, broken, rollout(prompt, 2, 1.0, [said("b")])]

    groups = {"alike": "zero_spread", "lost": "reward_failed"}
    asked(shelf, dropped=[one for prompt, reason in groups.items() for one in dropped(prompt, reason)])
    found = [(read.rollout.prompt_id, read.fate) for read in shelf.read(2) if read.rollout.prompt_id in groups]
    assert found == [
        ("alike", "reward_failed"), ("alike", "generate_failed"), ("alike", "zero_spread"),
        ("lost", "reward_failed"), ("lost", "generate_failed"), ("lost", "group_failed"),
    ]  # fmt: skip


def test_the_page_shows_the_newest_step_with_every_rollout_and_who_waited(get):
    page = get().text
    assert "4 of 4 rollouts" in page and "Step 2" in page
    assert "generate: 1.500 s" in page and "trainer waits: 1.500 s" in page


def test_a_filter_leaves_what_meets_it(get):
    for left, queries in {
        0: ("finish=length", "fate=%00", "text=abc"),
        1: ("highest=0.4", "lowest=0.4&highest=0.6", "fate=zero_spread", "fate=reward_failed", "text=%3CC"),
        2: ("lowest=0.5", "prompt=rig"),
        4: ("lowest=&highest=&fate=&finish=&prompt=",),
    }.items():
        for query in queries:
            assert f"{left} of 4 rollouts" in get(f"?{query}").text, query


def test_held_out_rollouts_are_a_set_of_their_own(get):
    page = get("?set=eval").text
    assert "1 of 1 rollouts" in page and "Evaluation after step 2" in page


def turns(shelf, reads, colour="none"):
    """Of the main sequence of each sample."""
    (group,) = groups_of(Encoding(shelf.model), reads, colour)
    return [branches[0].turns for branches in group.samples]


def test_colours_are_scaled_by_the_largest_and_follow_the_sign(shelf):
    (first,), second = turns(shelf, shelf.read(2)[:2], "advantage")
    assert [token.style for token in first.tokens] == ["background:rgba(22,163,74,0.150)"] * 2  # 0.5 of 2.0
    red = "background:rgba(220,38,38,0.600)"
    assert [turn.tokens[0].style for turn in second] == [red, "", red]
    assert second[1].tokens[0].hint == "id 99 · tool"
    assert (
        first.tokens[0].hint
        == "id 97 · probability 0.607 · logprob -0.5 · version 3 · advantage +0.5 · trainer - sampler +0.01"
    )


def test_tokens_of_two_versions_have_two_colours(shelf):
    _, (first, heard, last) = turns(shelf, shelf.read(2)[:2], "version")
    assert len({first.tokens[0].style, last.tokens[0].style}) == 2 and heard.tokens[0].style == ""


def test_what_a_model_wrote_is_not_markup(get):
    page = get().text
    assert "it raised &lt;b&gt;" in page and "it raised <b>" not in page and ">&lt;</span>" in page


WRONG = {
    "step": ["²", "-1", "1e3", "9" * 5000, "9" * 400],
    "page": ["x", "²", "0", "9" * 5000, "2"],
    "lowest": ["much", "nan"],
    "highest": ["1e999"],
    "colour": ["pink"],
    "set": ["evil"],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_query_is_answered_with_the_reason(get, field):
    for query, said in [
        *((f"?{field}={value}", f"{field} is &#39;{value[:4]}") for value in WRONG[field]),
        ("?step=9", "There is no step-00000009.jsonl"),
        ("?step=999999999", "There is no step-999999999.jsonl"),
        ("?set=eval&step=٣", "step is"),
        ("?steps=2", "there is no &#39;steps&#39;"),
    ]:
        answer = get(query)
        assert answer.status_code == 400 and said in answer.text
        assert len(re.search(r'class="error">([^<]*)<', answer.text)[1]) < 300


def test_a_path_that_is_not_there_is_answered_and_nothing_breaks(shelf):
    client = client_of(shelf, raise_server_exceptions=False)
    for path in ("/nothing", "/%00", "/%2e%2e/etc/passwd", "/" + "a" * 5000, "/?" + "a" * 5000):
        assert client.get(path).status_code in (400, 404)
    assert client.post("/").status_code == 405


def test_a_stage_without_a_step_yet_says_so(shelf):
    (shelf.metrics).write_text("")
    for path in (shelf.records / "rollouts").glob("*"):
        path.unlink()
    answer = client_of(shelf).get("/")
    assert answer.status_code == 200 and "No step has been trained yet" in answer.text


def test_a_page_elsewhere_cannot_read_this_one_through_a_name_of_its_own(shelf):
    assert client_of(shelf, "http://evil.example").get("/").status_code == 400


def test_the_shelf_of_a_stage_under_way_is_its_workspace(tmp_path):
    workspace = tmp_path / "work"
    (workspace / "records").mkdir(parents=True)
    (workspace / "job.json").write_text(json.dumps({"inputs": {"model": "/model"}}))
    stages = {"sft": stage_record("sft"), "rl": stage_record("rl", workspace=str(workspace))}
    found = shelf_of(Store(tmp_path / "store"), run_record("r", stages=stages))
    assert (found.stage, found.records, str(found.model)) == ("rl", workspace / "records", "/model")


def test_the_right_answer_stands_beside_every_sample_whose_prompt_has_one(shelf, get):
    page = get().text
    # once at the head of the group, once beside each of its two samples
    assert page.count('class="answer">a &lt; b</dd>') == 3 and page.count("<dt>right answer</dt>") == 3
    assert 'class="answer">held</dd>' in get("?set=eval").text
    assert shelf.evaluations() == [2]
    for path in (shelf.records / "rollouts").glob("*.answers.jsonl"):
        path.unlink()
    assert "right answer" not in get().text, "of an older run"


def test_the_samples_of_a_prompt_stand_together_and_no_page_splits_them():
    mixed = [Read(rollout=rollout(name, n, 1.0, []), fate="trained") for n in range(3) for name in "abc"]
    pages = together(mixed, 7)
    assert [[read.rollout.prompt_id for read in page] for page in pages] == [["a"] * 3 + ["b"] * 3, ["c"] * 3]
    assert [len(page) for page in together(mixed, 2)] == [3, 3, 3]
    assert together([], 7) == [[]]


def test_a_prompt_is_shown_once_with_the_mean_of_its_rewards(get):
    page = get("?prompt=right").text
    assert page.count('<pre class="prompt">') == 1 and page.count('class="sample"') == 2
    assert "<dt>mean reward</dt><dd>0.5</dd>" in page


def test_links_lead_to_the_steps_before_and_after_and_keep_the_filter(shelf):
    lines = [{"event": "step", "step": step, "total": 9} for step in (1, 2, 5)]
    shelf.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = client_of(shelf).get("/?step=2&page=1&fate=trained").text
    links = dict(re.findall(r'<a data-key="(\w+)" href="\?([^"]*)"', page))
    assert links == {"ArrowLeft": "step=1&amp;fate=trained", "ArrowRight": "step=5&amp;fate=trained"}


def test_the_page_has_two_looks_and_loads_nothing(get):
    page = get().text
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    assert all(url.startswith(("?", "data:image/svg")) for url in re.findall(r'(?:href|src)="([^"]*)"', page))
    for text in re.findall(r"#[0-9a-f]{3,6}", page.rpartition("</style>")[2]):
        raise AssertionError(f"{text} is the same by day and by night")


def said(text, version=3):
    return sampled_span(list(text.encode()), [-0.5] * len(text.encode()), version)


def heard(text):
    return Span(kind="tool", token_ids=tuple(text.encode()))


def asked(shelf, *rollouts, dropped=()):
    """A client of the page of a step with these rollouts."""
    folder = shelf.records / "rollouts"
    write_rollouts(folder / "step-00000002.jsonl", rollouts)
    write_rollouts(folder / "step-00000002.dropped.jsonl", dropped)
    for path in folder.glob("*.scores-*"):
        path.unlink()
    client = client_of(shelf)
    return lambda query="": client.get(f"/{query}").text


def samples_of(shelf):
    return [sample for group in groups_of(Encoding(shelf.model), shelf.read(2), "none") for sample in group.samples]


def test_a_sample_is_shown_turn_by_turn_with_who_speaks_and_what_is_called(shelf):
    spans = [said("so <tool_call>2+2</tool_call>"), heard("4"), said("four"), heard("<|im_start|>user\nSure?")]
    asked(shelf, rollout("p", 0, 1.0, spans, role="solver"))
    ((branch,),) = samples_of(shelf)
    assert [(t.speaker, t.is_sampled, t.num_calls) for t in branch.turns] == [
        ("solver", True, 1), ("tool", False, 0), ("solver", True, 0), ("user", False, 0)
    ]  # fmt: skip
    assert "".join(t.text for t in branch.turns[0].tokens if t.kind == "call") == "<tool_call>2+2</tool_call>"
    assert "".join(t.text for t in branch.turns[0].tokens) == "so <tool_call>2+2</tool_call>"


def test_a_long_result_is_folded_and_a_short_one_is_not(shelf):
    page = asked(shelf, rollout("p", 0, 1.0, [said("a"), heard("4"), said("b"), heard("long " * 99)]))()
    assert page.count("<summary>long long") == 1 and page.count("<summary>") == 1


def test_branches_stand_below_the_sample_that_they_belong_to(shelf):
    counted = {"metrics": {"rooms": 3.0}, "turns": 1}
    main, other = (rollout("p", index, float(index), [said("main")], metadata=counted) for index in (0, 1))
    judged = {"branch": 1, "role": "judge", "finish_reason": "length", "reward_components": {"agreed": 0.5}}
    own = rollout("p", 0, 0.25, [said("fair")], prompt="a", **judged)
    get = asked(shelf, main, own, other)
    first, second = samples_of(shelf)
    assert [(b.read.rollout.branch, b.role, b.prompt) for b in first] == [(0, "", ""), (1, "judge", "a")]
    assert len(second) == 1
    page = get()
    assert "<dt>mean reward</dt><dd>0.5</dd>" in page and "<dt>samples</dt><dd>2</dd>" in page
    assert page.count('<details class="branch">') == 1 and "<dt>agreed</dt><dd>0.5</dd>" in page
    assert page.count("<dt>rooms</dt><dd>3</dd>") == 2
    assert "1 of 3 rollouts" in get("?role=judge") and "2 of 3 rollouts" in get("?sample=0")


def test_samples_that_begin_with_prompts_of_their_own_stand_under_their_messages(shelf):
    asked(shelf, rollout("p", 0, 1.0, [said("x")]), rollout("p", 1, 1.0, [said("y")], prompt="a"))
    line = {"prompt_id": "p", "answer": "", "messages": [{"role": "user", "content": "Sort them."}]}
    (shelf.records / "rollouts" / "step-00000002.answers.jsonl").write_text(json.dumps(line) + "\n")
    (group,) = groups_of(Encoding(shelf.model), shelf.read(2), "none")
    assert group.prompt == "user: Sort them." and [branches[0].prompt for branches in group.samples] == ["?", "a"]


def test_a_failure_is_shown_with_its_reason_and_its_last_lines(shelf):
    lines = "\n".join(f"line {number} of it" for number in range(50))
    broken = {"generate_error": f"RuntimeError: the agent ended with 1\n{lines}"}
    failed = rollout("f", 0, None, [], finish_reason="error", metadata=broken)
    words = {"generate_error": "AgentFailed: it ended with code 1; its last words: none", "last_words": "one\ntwo | 2"}
    dead = rollout("d", 0, None, [], finish_reason="error", metadata=words)
    unrewarded = rollout("g", 0, None, [said("a")], metadata={"reward_error": "reported none"})
    get = asked(shelf, rollout("p", 0, 1.0, [said("a")]), dropped=[failed, dead, unrewarded])
    page = get("?fate=failed")
    assert "3 of 4 rollouts" in page and "any failure (3)" in page
    assert "</b> AgentFailed: it ended with code 1; its last words: none\n<pre>one\ntwo | 2</pre>" in page
    for text in ("<b>no response</b> RuntimeError: the agent ended with 1", "<b>no reward</b> reported none"):
        assert text in page
    assert "line 49 of it" in page and page.count(" of it\n") + 1 == LAST_LINES


def test_a_page_draws_no_more_than_so_many_tokens_however_long_the_samples_are(shelf, monkeypatch):
    monkeypatch.setattr("nanodag.viewer.sample_view.TOKENS_A_PAGE", 90)
    spans = [said("x" * 500), *[heard("y"), said("z")] * 250]
    get = asked(shelf, rollout("p", 0, 1.0, spans), rollout("p", 1, 1.0, [said("<tool_call>" * 50)]))
    page = get()
    assert "… 955 tokens left out …" in page and "… 505 tokens left out …" in page
    assert page.count('title="id ') == 90
    assert "… 910 tokens left out …" in get("?prompt=p&sample=0")


def test_what_cannot_be_seen_is_spelled_out_and_a_letter_of_several_tokens_is_whole(shelf):
    hostile = "\x1b[2J\u202etxt\u202c\r é 漢"
    page = asked(shelf, rollout("p", 0, 1.0, [said(hostile)], reward_components={"\u2066<b>\ud800": 1.0}))()
    assert "⟨U+001B⟩" in page and "⟨U+202E⟩" in page and "⟨U+000D⟩" in page and "⟨U+2066⟩&lt;b&gt;?" in page
    assert ">漢</span>" in page and re.search(r'title="id 195 [^"]*\| id 169 [^"]*">é</span>', page)
    assert not set(page) & set("\x1b\u202e\u202c\r\u2066\ufffd")


def test_a_token_that_the_tokenizer_does_not_know_is_shown_as_unknown(shelf):
    page = asked(shelf, rollout("p", 0, 1.0, [sampled_span([A, 10**6], [-0.5, -0.5], 3)]))()
    assert re.search('title="id 1000000 [^"]*">\ufffd</span>', page)


def test_no_script_but_the_pages_own_may_run(get):
    first, second = get(), get()
    policies = [page.headers["content-security-policy"] for page in (first, second)]
    nonces = [re.search(r"script-src 'nonce-([^']+)'", policy)[1] for policy in policies]
    assert re.findall("<script[^>]*>", first.text) == [f'<script nonce="{nonces[0]}">'] and nonces[0] != nonces[1]
    assert "default-src 'none'" in policies[0]


def test_samples_are_printed_with_their_turns_branches_and_failures(shelf):
    main = rollout(
        "p",
        0,
        1.0,
        [said("calls"), heard("\x1b[31m408 [bold]x[/] :smile: \\"), said("399")],
        reward_components={"exact": 1.0},
    )
    own = rollout("p", 0, 1.0, [said("fair")], branch=1, role="judge")
    failed = rollout("p", 1, None, [said("a")], metadata={"reward_error": "reported none"})
    asked(shelf, main, own, failed, rollout("q", 0, 0.0, [said("last")]))
    text = text_of(Encoding(shelf.model), first_samples(shelf.read(2), 2)).plain.rstrip("\n")
    assert text.splitlines() == [
        "prompt p", "      ?",
        "reward 1 · trained · sample 0 · ended by stop · turns 3 · tokens 8 · exact 1",
        "    model calls", "    tool ⟨U+001B⟩[31m408 [bold]x[/] :smile: \\", "    model 399",
        "  branch 1 · judge · reward 1 · trained · ended by stop · tokens 4", "    judge fair",
        "no reward · trained · sample 1 · ended by stop · tokens 1", "    no reward: reported none", "    model a",
    ]  # fmt: skip


def test_the_terminal_prints_a_step_of_those_that_failed_or_of_a_role(shelf, capsys):
    print_rollouts(shelf, Wanted(fate="failed"), most=5, step=None)
    shown = capsys.readouterr().out
    assert "step 2: 1 of 4 rollouts" in shown and "no reward: it raised <b>" in shown and "prompt right" not in shown
    print_rollouts(shelf, Wanted(role="judge"), most=5, step=2)
    assert capsys.readouterr().out == "step 2: 0 of 4 rollouts\n"
    with pytest.raises(ArtifactNotFound, match="step-00000007"):
        print_rollouts(shelf, Wanted(), most=5, step=7)


def test_the_page_opens_with_the_step_role_and_failures_that_were_asked_for(shelf, monkeypatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda *unused, **also: None)
    serve(make_app(shelf), port=0, query={"step": "2", "role": "a judge", "fate": "failed"})
    address = capsys.readouterr().out.split()[5]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?step=2&role=a\+judge&fate=failed", address)
    page = client_of(shelf).get(address)
    assert page.status_code == 200 and "0 of 4 rollouts" in page.text


def test_a_timeline_has_a_lane_for_each_side_and_is_left_out_without_spans(shelf):
    drawn = client_of(shelf).get("/?step=2").text.partition('class="timeline"')[2]
    drawn = drawn[: drawn.index("</svg>")]
    assert drawn.count("<rect") == 3 and drawn.count("stroke-dasharray") == 1 and "train: 0.500 s" in drawn
    assert ">samplers<" in drawn and ">trainer<" in drawn and ">weights<" not in drawn and ">0.2 s<" in drawn
    (shelf.records / "timeline.jsonl").unlink()
    assert 'class="timeline"' not in client_of(shelf).get("/?step=2").text


def test_a_prompts_pictures_are_shown_from_beside_the_rollouts(shelf, get, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "images"))
    digest = keep(count_shapes()[0]["images"][0])
    ids = ImageLayout({"patch_size": 8, "merge_size": 2}).ids_of(digest)
    spans = (prompt_span([A, *ids, B]), said("c"))
    asked(shelf, dropped=[replace(rollout("seen", 0, 1.0, []), spans=spans)])
    append_ledger(shelf.records, "seen", "dropped", "zero_spread")
    assert f"image {digest[:8]} is not here" in get("?prompt=seen").text
    keep_beside(shelf.records / "images", ids)
    page = get("?prompt=seen").text
    assert re.search(rf'<img class="picture" src="data:image/png;base64,[\w+/=]+" alt="image {digest[:8]}', page)
    assert '<pre class="prompt">ab</pre>' in page
