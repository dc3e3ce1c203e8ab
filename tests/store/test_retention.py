"""What goes and what stays: nothing that a run refers to ever goes."""

import random
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nanodag.errors import ConfigError, StoreError
from nanodag.run.retention import Best, best_of, free, plan
from nanodag.store import Store
from nanodag.store.atomic import temporary_name
from tests.run_records import built, run_record, stage_record
from tests.store.making import forge, key, made_from, publish

OLD, NOW = 1_000_000.0, time.time()


def write_run(store, name, *artifacts, **fields):
    stages = {f"s{number}": built(artifact) for number, artifact in enumerate(artifacts)}
    store.write_run(run_record(name, **{"created": NOW, "stages": stages, **fields}))


def can_go(store, **policy):
    return {(item.what, item.name) for item in plan(store, **policy).items}


def runs_that_go(store, **policy):
    return {name for what, name in can_go(store, **policy) if what == "run"}


def name_of(artifact):
    return ("attempt", f"{artifact.key}/{artifact.attempt}")


def test_only_what_no_run_refers_to_goes(store, product):
    base = publish(store, product, key("a"))
    used = publish(store, product, key("b"), lineage=made_from(base))
    superseded = publish(store, product, key("c"))
    newest = publish(store, product, key("c"))
    write_run(store, "r", used, newest)  # base is not named, but `used` was made from it
    assert can_go(store) == {name_of(superseded)}
    found = plan(store)
    assert found.num_kept == 3 and found.num_bytes == 9
    freed, stayed = free(store, found, settle_s=0)
    assert (freed, stayed) == (9, [])
    assert store.lookup(key("c")) == newest and store.attempts(key("c")) == [newest.attempt]
    assert all((store.materialize(a) / "weights").read_bytes() == b"abcdefgh" for a in (base, used, newest))
    assert can_go(store) == set()


def test_all_attempts_of_a_stage_that_is_under_way_stay(store, product):
    first, second = publish(store, product, key("a")), publish(store, product, key("a"))
    store.write_run(run_record("r", state="running", created=OLD, stages={"s": built(first, state="failed")}))
    assert can_go(store, keep_runs=1, keep_days=1) == set()
    assert store.lookup(key("a")) == second


def test_what_a_run_comes_to_refer_to_meanwhile_is_brought_back_first_with_its_origins(store, product, monkeypatch):
    base, other, useless = (publish(store, product, key(letter)) for letter in "abc")
    found = plan(store)
    delete, was_hidden, order = store.delete, [], []

    def meanwhile(seconds):
        was_hidden.append(store.lookup(base.key) is None)
        publish(store, product, other.key)  # a builder that did not find it
        new = publish(store, product, key("d"), lineage=made_from(base))
        write_run(store, "r", other, new)

    def watched(*arguments):
        order.append(store.lookup(base.key) == base)
        delete(*arguments)

    monkeypatch.setattr(time, "sleep", meanwhile)
    monkeypatch.setattr(store, "delete", watched)
    _, stayed = free(store, found)
    assert was_hidden == order == [True] and store.attempts(useless.key) == []
    assert len(stayed) == 2 and f"{base.key}/{base.attempt}: a run has come to refer to it" in stayed
    assert len(store.attempts(other.key)) == 2 and store.lookup(base.key) == base
    for attempt in store.attempts(other.key):
        assert (store.materialize(store.attempt(other.key, attempt)) / "weights").read_bytes() == b"abcdefgh"


def test_one_that_cannot_be_brought_back_keeps_none_of_the_others_away(store, product, monkeypatch):
    first, second = publish(store, product, key("a")), publish(store, product, key("b"))
    found = plan(store)
    bring_back = store.backend.bring_back

    def broken(at, *others):
        if at == first.key:
            raise OSError("the disk reports an error")
        return bring_back(at, *others)

    monkeypatch.setattr(time, "sleep", lambda seconds: write_run(store, "r", first, second))
    monkeypatch.setattr(store.backend, "bring_back", broken)
    _, stayed = free(store, found)
    assert "could not be brought back (the disk" in stayed[0] and store.lookup(second.key) == second


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_is_resumed_meanwhile_keeps_its_record_and_its_workspace(store, product, ended):
    artifact = publish(store, product, key("a"))
    stages = {"s": built(artifact), "t": stage_record(key=key("b"), state="failed")}
    old = run_record("r", state="failed", created=OLD, started=OLD, stages=stages)
    store.write_run(old)
    (store.workspace(key("b")) / "state").write_text("abc")
    found = plan(store, keep_days=1.0)
    assert {item.what for item in found.items} >= {"run", "workspace"}
    store.write_run(old.changed(state="failed" if ended else "running", started=NOW if ended else OLD))
    _, stayed = free(store, found, settle_s=0)
    assert "r: that run has been resumed" in stayed and store.runs() == ["r"]
    assert store.lookup(key("a")) == artifact and (store.workspace(key("b")) / "state").exists()


def test_when_it_is_ended_in_the_middle_everything_comes_back(store, product, monkeypatch):
    artifacts = [publish(store, product, key(letter)) for letter in "ab"]

    def ended(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", ended)
    with pytest.raises(KeyboardInterrupt):
        free(store, plan(store))
    assert [store.lookup(a.key) for a in artifacts] == artifacts


def test_a_key_that_is_being_built_is_left_alone(store, product):
    artifact = publish(store, product, key("a"))
    with store.building(key("a")):
        _, stayed = free(store, plan(store), settle_s=0)
    assert len(stayed) == 1 and "is building that key" in stayed[0]
    assert store.lookup(key("a")) == artifact


def test_runs_are_kept_by_number_or_by_age(store, product):
    made = [publish(store, product, key(letter)) for letter in "abcd"]
    for number, artifact in enumerate(made):
        write_run(store, f"r{number}", artifact, created=OLD if number < 3 else NOW)
    assert can_go(store) == set()
    assert runs_that_go(store, keep_runs=2) == runs_that_go(store, keep_runs=2, keep_days=1.0) == {"r0", "r1"}
    assert [item.name for item in plan(store, keep_runs=2, keep_days=1.0).items if item.what == "run"] == ["r0", "r1"]
    assert can_go(store, keep_days=1.0) == {("run", f"r{n}") for n in range(3)}, "no attempt: they were made today"
    free(store, plan(store, keep_runs=2), settle_s=0)
    assert store.runs() == ["r2", "r3"] and [store.lookup(a.key) for a in made] == [None, None, made[2], made[3]]


def test_a_run_that_completed_counts_before_a_newer_one_that_was_stopped(store, product):
    made = [publish(store, product, key(letter)) for letter in "abcd"]
    for number, state in enumerate(["completed", "stopped", "completed", "stopped"]):
        write_run(store, f"r{number}", made[number], state=state)
    assert runs_that_go(store, keep_runs=1) == {"r0", "r1", "r3"}
    assert runs_that_go(store, keep_runs=2) == {"r1", "r3"}
    assert runs_that_go(store, keep_runs=3) == {"r1"}, "then the newest others"


def test_nights_go_by_age_alone(store, product):
    write_run(store, "night", publish(store, product, key("a")), nightly={"by_schedule": True, "due": OLD}, created=OLD)
    write_run(store, "r0", publish(store, product, key("b")))
    assert can_go(store, keep_runs=1) == set()
    assert ("run", "night") in can_go(store, keep_days=1.0)


def test_the_best_of_a_stage_stays_with_what_it_was_made_from(store, product):
    bases = [publish(store, product, key(letter)) for letter in "abc"]
    evals = [
        publish(store, product, key(k), stage="eval", lineage=made_from(base), metrics={"gsm": {"accuracy": value}})
        for k, base, value in zip("def", bases, (0.2, 0.7, 0.4))
    ]
    best = Best(stage="eval", metric="gsm.accuracy", is_lowest=False)
    gone = {name_of(a) for number in (0, 2) for a in (bases[number], evals[number])}
    assert can_go(store, keep_best=(best,)) == gone
    lowest = can_go(store, keep_best=(best_of("eval.gsm.accuracy:min"),))
    assert name_of(evals[0]) not in lowest and name_of(evals[1]) in lowest
    with pytest.raises(ConfigError, match="no stage of that name"):
        plan(store, keep_best=(best_of("eval.acuracy"),))
    with pytest.raises(ConfigError, match=r"STAGE\.METRIC"):
        best_of("accuracy")


def test_the_best_of_a_stage_may_be_an_artifact_that_it_found_made(store, product):
    evals = [
        publish(store, product, key(k), stage="eval", metrics={"accuracy": value})
        for k, value in zip("abc", (0.2, 0.7, 0.9))
    ]
    for name, artifact in (("worse", evals[0]), ("better", evals[1])):  # whose stage s0 found it made
        write_run(store, name, artifact, created=OLD)
    write_run(store, "newest")
    gone = {name_of(evals[0]), name_of(evals[2]), ("run", "worse"), ("run", "better")}
    assert can_go(store, keep_runs=1, keep_best=(best_of("s0.accuracy"),)) == gone


def test_what_cannot_be_read_is_not_judged(store, product):
    newer = publish(store, product, key("a"))
    forge(store, newer, lambda raw: raw.update(format=9))
    assert can_go(store) == set() and "has format 9" in plan(store).notes[0]


def test_workspaces_go_when_no_run_goes_on_with_them(store, product):
    for letter in "ab":
        (store.workspace(key(letter)) / "state").write_text("abc")
    store.write_run(run_record("r", stages={"s": stage_record(key=key("a"), state="stopped")}))
    assert can_go(store) == {("workspace", f"work/{key('b')}")}
    free(store, plan(store), settle_s=0)
    assert [path.name for path in (store.local / "work").iterdir()] == [key("a")]


def test_leftovers_of_killed_writers_go_and_those_of_other_hosts_stay(tmp_path, product):
    store = Store(tmp_path / "s")
    good = publish(store, product)
    write_run(store, "r", good)
    home = store.local / "artifacts" / good.key
    _, pid, number = temporary_name().split("-")
    of_dead, of_living = (temporary_name().replace(f"-{pid}-", f"-{other}-") for other in (999_999_999, 1))
    for name in (of_dead, of_living, f".abcdef-{pid}-{number}"):
        (home / name).mkdir()
        (home / name / "half").write_text("abc")
        (store.local / "runs" / name).write_text("{")
    places = (f"artifacts/{good.key}", "runs")
    assert can_go(store) == {("leftover", f"{place}/{of_dead}") for place in places}
    publish(store, product)  # the next publisher clears away the same
    assert {path.name for path in home.glob(".*")} == {of_living, f".abcdef-{pid}-{number}"}
    free(store, plan(store), settle_s=0)
    names = {path.name for path in (store.local / "runs").iterdir()}
    assert names == {"r.json", of_living, f".abcdef-{pid}-{number}"}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_runs_and_the_policy_what_remains_is_whole(tmp_path, product, seed):
    source = random.Random(seed)
    store = Store(tmp_path / "s")
    made = []
    for number in range(10):
        above = source.choice(made) if made and source.random() < 0.7 else None
        lineage = made_from(above) if above else {}
        made.append(publish(store, product, key("abcdef"[number % 6]), lineage=lineage))
    for number in range(4):
        write_run(store, f"r{number}", *source.sample(made, 2), created=source.choice([OLD, NOW]))
    policy = {"keep_runs": source.randrange(3), "keep_days": source.choice([0.0, 1.0])}
    free(store, plan(store, **policy), settle_s=0)
    for record in store.records_of_runs().values():
        waiting = [entry.artifact for entry in record.stages.values()]
        while waiting:
            artifact = store.attempt(*waiting.pop())
            store.materialize(artifact)
            waiting += [(up["key"], up["attempt"]) for up in artifact.lineage.values()]
    assert can_go(store, **policy) == set()


def test_a_run_is_as_old_as_its_last_try(store, product):
    write_run(store, "resumed", publish(store, product, key("a")), created=OLD, started=NOW - 3600, ended=NOW - 60)
    write_run(store, "old", publish(store, product, key("b")), created=OLD, started=OLD, ended=OLD)
    assert runs_that_go(store, keep_days=7) == {"old"}


def test_a_record_that_cannot_be_read_for_now_is_not_taken_for_none(product, tmp_path, monkeypatch):
    store = Store(f"memory://records-{tmp_path.name}", local=tmp_path / "here")
    made = publish(store, product, key("a"))
    write_run(store, "mine", made)
    whole = MemoryFileSystem.cat_file

    def slow(self, path, *arguments, **options):
        if path.endswith("mine.json"):
            raise TimeoutError("slow down")
        return whole(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", slow)
    for ask in (lambda: plan(store), lambda: store.find_run("mine")):
        with pytest.raises(StoreError, match="slow down"):
            ask()
    assert store.find_run("another") is None
