"""A run in short, from its record and a store, as it stands at the end of `nanodag run`."""

import json
import socket

import pytest
from rich.console import Console

from nanodag.cli.show import print_summary
from nanodag.data.picture_problems import count_shapes
from nanodag.host.images import FOLDER, keep
from nanodag.report.page import build_report, to_html, to_markdown
from nanodag.report.summary import run_context, summary_of
from nanodag.store import stage_key
from tests.report.finished_run import markup_of
from tests.run_records import built, run_record, stage_record

ABOUT = {"metric": "exact_match", "higher_is_better": True, "form": "x", "chat": True, "num_fewshot": 0}
NUM_ITEMS, MADE = 100, {"attempt", "digest"}


@pytest.fixture
def publish(store, tmp_path):
    """Puts a stage into the store; returns what the run's record says of it."""

    def put(name, kind, files, *, inputs=None, entries=None, metrics=None, config=None):
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        ups = {label: (source, entries[source]) for label, source in (inputs or {}).items()}
        artifact = store.publish(
            stage_key(kind=kind, code_version=1, config={"name": name}, inputs={}),
            tmp_path / name,
            **{"kind": kind, "stage": name, "config": config or {}, "sources": {}, "cost": {}, "environment": {}},
            metrics=metrics or {},
            lineage={
                label: {"stage": source, "kind": up.kind, "key": up.key, **up.made.model_dump(include=MADE)}
                for label, (source, up) in ups.items()
            },
        )
        entry = built(artifact, inputs=inputs or {})
        return entry.changed(made=entry.made.changed(inputs={label: up.made.digest for label, (_, up) in ups.items()}))

    return put


def evaluate(publish, entries, model, right):
    """Add an eval of a model: right: of 100 items of each benchmark."""
    files, results = {}, {}
    for name, num in zip(("gains", "loses", "same"), right, strict=True):
        lines = [{"id": f"{i}", "scores": {"exact_match": float(i < num)}} for i in range(NUM_ITEMS)]
        files[f"samples/{name}.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines)
        value = num / NUM_ITEMS
        score = {"value": value, "stderr": 0.05, "low": value - 0.1, "high": value + 0.1, "num_items": NUM_ITEMS}
        results[name] = {**ABOUT, **score}
    files["results.json"] = json.dumps({"benchmarks": results, "samples": []})
    config = {"benchmarks": [{"name": name} for name in results]}
    how = {"inputs": {"model": model}, "entries": entries, "config": config}
    entries[f"eval_{model}"] = publish(f"eval_{model}", "eval", files, **how)


@pytest.fixture
def record(publish):
    """SFT and RL, each asked 100 items of three benchmarks: `gains` 20 -> 60, `loses` 50 -> 20, `same` 30 -> 32."""
    entries = {}
    entries["sft"] = publish("sft", "sft", {"model": "sft"})
    given = {"inputs": {"model": "sft"}, "entries": entries, "metrics": {"version": 0}}
    entries["rl"] = publish("rl", "rl", {"model": "rl"}, **given)
    evaluate(publish, entries, "sft", (20, 50, 30))
    evaluate(publish, entries, "rl", (60, 20, 32))
    return run_record("r", stages=entries)


def markdown(store, record):
    return to_markdown(build_report(record.run, run_context(store, record)))


def test_a_summary_has_scores_and_what_got_better_and_worse_by_more_than_noise(store, record):
    found = summary_of(store, record)
    assert found.scores.headers == ["benchmark", "SFT", "RL"]
    cells = [("gains", "%"), ("20.0", "10.0–30.0"), ("60.0", "50.0–70.0")]
    assert [(cell.text, cell.detail) for cell in found.scores.rows[0]] == cells
    assert [line.partition(" points (")[0] for line in found.better] == ["gains: RL over SFT +40.0"]
    assert [line.partition(" points (")[0] for line in found.worse] == ["loses: RL over SFT −30.0"]
    assert found.better[0].endswith(", p < 0.001)") and found.num_compared == 3
    kept = "; what it knew stays with a share of that task in rl.data, rl.kl_coefficient=0.1, or a lower learning rate"
    assert found.worse[0].endswith(f", p < 0.001){kept}")
    assert found.warnings == ("rl learned nothing: no update of the weights was made.",)


def test_it_is_shown_in_the_terminal_and_as_an_artifact(store, record, tmp_path):
    with (tmp_path / "said").open("w+") as stream:
        print_summary(Console(file=stream, width=100), store, record)
        stream.seek(0)
        said = stream.read()
    assert "60.0  50.0–70.0" in said and "better gains: RL over SFT" in said and "worse  loses: RL over SFT" in said
    assert "rl learned nothing" in said
    text = markdown(store, record)
    assert text.startswith("# Report of run r\n") and "| loses | RL − SFT | −30.0" in text
    assert "rl learned nothing" in text and "| eval\\_rl | eval | " in text


def test_all_that_p_is_corrected_for_is_counted_and_said(store, record, publish):
    """A control trained from the same SFT beside RL: three models, three benchmarks, three differences each."""
    entries = dict(record.stages)
    entries["control"] = publish("control", "sft", {"model": "c"}, inputs={"model": "sft"}, entries=entries)
    evaluate(publish, entries, "control", (20, 50, 30))
    record = record.changed(stages=entries)
    found = summary_of(store, record)
    assert found.num_compared == 9
    said = [line.partition(" points (")[0] for line in (*found.better, *found.worse)]
    changes = {"gains": "+40.0", "loses": "−30.0"}.items()
    assert said == [f"{name}: RL over {other} {points}" for name, points in changes for other in ("SFT", "CONTROL")]
    assert "Which differences are real: 4 of 9" in markdown(store, record)


def test_scores_of_a_model_that_is_the_runs_no_more_are_in_no_column(store, record, publish):
    again = publish("sft-again", "sft", {"model": "another"})
    record = record.changed(stages={**record.stages, "sft": again})
    found = summary_of(store, record)
    assert found.scores.headers == ["benchmark", "RL"], "eval_sft is of the sft before"
    assert found.num_compared == 0, "and RL did not come from this one"
    text = markdown(store, record)
    assert "> **rl is stale: sft was built since.**" in text and "> **eval\\_rl is stale: rl is stale.**" in text


def test_a_run_under_way_shows_what_it_has_and_a_killed_one_where_it_was(store, record, publish, tmp_path, monkeypatch):
    lines = [
        {"event": "step", "step": n, "total": 9, "time": 5.0, "reward": 0.1 * n, "zero_spread_share": 1.0}
        for n in (1, 2)
    ]
    said = {"prompt": "<|user_start|>2 + 2?<|user_end|>", "response": "4<|assistant_end|>", "reward": 1.0}
    workspace = store.local / "work" / ("0" * 40)
    workspace.mkdir(parents=True)
    monkeypatch.setenv(FOLDER, str(workspace / "records" / "images"))  # a picture beside its rollouts
    said = [{**said, "images": [keep(count_shapes()[0]["images"][0])]}, {**said, "reward": 0.0}]
    lines.append({"event": "sample", "step": 2, "total": 9, "time": 5.0, "responses": said})
    (workspace / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    under_way = {"inputs": {"model": "sft"}, "started": 1.0, "key": "0" * 40, "workspace": str(workspace)}
    stages = {"sft": record.stages["sft"], "rl": stage_record("rl", state="running", **under_way)}
    stages["eval_rl"] = stage_record("eval", inputs={"model": "rl"})
    pipeline = {"stages": {name: {"kind": entry.kind, "benchmarks": []} for name, entry in stages.items()}}
    record = record.changed(stages=stages, pipeline=pipeline, state="running", host=socket.gethostname())
    report = build_report("r", run_context(store, record))
    assert report.warnings == [
        "rl: 100% of the last groups have rewards that are all alike: nothing to prefer. Change the prompts."
    ]
    training = next(part for section in report.sections for part in section.parts if part.samples)
    assert [len(sample["pictures"]) for sample in training.samples] == [1, 0]
    assert training.samples[0]["pictures"][0].startswith("data:image/png;base64,")
    first, *_, config = report.sections
    drawing, progress = first.parts
    assert [(p.name, p.state, p.amount) for p in progress.progress] == [("rl", "interrupted", "2/9 steps")]
    assert drawing.drawing.count("<rect") == 3 and drawing.drawing.count('class="arrow"') == 2
    assert [part.heading for part in config.parts] == ["sft", "rl", "eval_rl"]
    page = markup_of(to_html(report, page="live.html.jinja"))
    assert "<td>2 + 2?</td><td><code>4</code></td>" in page
    assert [page.count(f">{verdict}</span>") for verdict in ("right", "wrong")] == [1, 1]


def test_a_run_without_scores_has_none(store, record):
    assert summary_of(store, record.changed(stages={"sft": record.stages["sft"]})).scores is None
