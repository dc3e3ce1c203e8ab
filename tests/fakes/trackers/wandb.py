"""As much of wandb as nanodag uses. Each call is a line of JSON in the file FAKE_WANDB; the word in FAKE_WANDB_DO says
where it misbehaves: `raise` at init, `raise-late` at the first log, `hang` at finish, `die` at the first log."""

import json
import os
import time


def _note(**call):
    with open(os.environ["FAKE_WANDB"], "a") as stream:
        stream.write(json.dumps(call) + "\n")


class Settings:
    def __init__(self, *, console, silent):
        self.console, self.silent = console, silent


class Table:
    def __init__(self, *, columns, data):
        self.columns, self.data = columns, data


class Artifact:
    def __init__(self, name, type, metadata):
        self.name, self.type, self.metadata, self.references = name, type, metadata, []

    def add_reference(self, uri, *, checksum):
        assert not checksum  # which would read all of it
        self.references.append(uri)


class Run:
    def __init__(self, url):
        self.url, self.offline = url, not url

    def log(self, data, step=None, commit=None):
        do = os.environ.get("FAKE_WANDB_DO")
        if do == "raise-late":
            raise ValueError("the server said no")
        if do == "die":
            os._exit(9)
        _note(call="log", step=step, data={k: vars(v) if isinstance(v, Table) else v for k, v in data.items()})

    def log_artifact(self, artifact):
        _note(call="log_artifact", **vars(artifact))

    def finish(self, exit_code=None):
        if os.environ.get("FAKE_WANDB_DO") == "hang":
            time.sleep(600)
        _note(call="finish")


def init(
    *, entity, project, dir, id, name, tags, config, group, job_type, mode, resume, settings
):  # fmt: skip
    if os.environ.get("FAKE_WANDB_DO") == "raise":
        raise ConnectionError("no route to api.wandb.ai")
    assert isinstance(settings, Settings) and os.path.isdir(dir)
    given = {"project": project, "group": group, "name": name, "id": id, "tags": tags, "resume": resume}
    _note(call="init", **given, entity=entity, mode=mode, job_type=job_type, config=config, dir=dir)
    return Run("" if mode == "offline" else f"https://wandb.test/me/{project}/runs/{id}")
