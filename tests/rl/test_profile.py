"""A profile on demand: a trace of each side and a timeline, and nothing else changes."""

import gzip
import json

from nanodag.config import result_config
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


def test_a_profiled_step_leaves_traces_of_each_rank_and_sampler_and_the_same_bytes(tmp_path):
    jobs = []
    for name, values in (("plain", {}), ("profiled", {"profile_steps": [2]})):
        (tmp_path / name).mkdir()
        jobs.append(make_job(tmp_path / name, eval_prompts=0, **values))
        run(jobs[-1])
    plain, profiled = jobs
    assert digest(plain.output) == digest(profiled.output) and not (plain.records / "profile").exists()
    (folder,) = (profiled.records / "profile").iterdir()
    assert folder.name == "step-00000002"
    (sampled,) = folder.glob("sampler-0/*.trace.json.gz")
    for path, wanted in ((folder / "trainer-0.trace.json.gz", "aten::"), (sampled, "aten::")):
        names = {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert any(name.startswith(wanted) for name in names), path
    timeline = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {"train", "generate", "sync"} <= {event["name"] for event in timeline}
    log = (profiled.workspace / "worker.log").read_text()
    assert "no trace" not in log and "not traced" not in log
