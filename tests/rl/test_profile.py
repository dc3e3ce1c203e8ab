"""A profile on demand: a trace of each side and a timeline, and nothing else changes."""

import gzip
import json

from nanodag.config.resolve import result_config
from nanodag.rl.rollouts.metrics import chrome_trace
from tests.rl.fakes import config
from tests.rl.stages import digest, make_job, run


def test_spans_are_rows_of_a_chrome_trace_in_microseconds():
    found = chrome_trace([("train", 10.0, 12.5), ("generate", 11.0, 11.25)])["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in found if event["ph"] == "M"}
    spans = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"]
    assert spans == [("trainer", "train", 10_000_000, 2_500_000), ("samplers", "generate", 11_000_000, 250_000)]


def test_a_profile_is_no_part_of_a_key():
    assert result_config(config(profile_steps=[5])) == result_config(config())


def test_a_profiled_step_leaves_traces_of_each_rank_and_sampler_and_the_same_bytes(plain, tmp_path):
    job = make_job(tmp_path, profile_steps=[2])
    run(job)
    assert digest(plain.output) == digest(job.output) and not (plain.records / "profile").exists()
    (folder,) = (job.records / "profile").iterdir()
    assert folder.name == "step-00000002"
    (sampled,) = folder.glob("sampler-0/*.trace.json.gz")
    for path in (folder / "trainer-0.trace.json.gz", sampled):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events), path
    timeline = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {"train", "generate", "sync"} <= {event["name"] for event in timeline}
    log = (job.workspace / "worker.log").read_text()
    assert "no trace" not in log and "not traced" not in log
