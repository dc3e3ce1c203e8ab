"""Takes an existing Hugging Face model as a stage's output: `python -m nanodag.model.import_model job.json`."""

import json
import logging
import shutil
import time
from typing import Any

from nanodag.errors import SourceError
from nanodag.model.architecture import MODEL_CODE, write_json
from nanodag.model.generation import GENERATION_FILE, generation_config
from nanodag.model.headers import ADAPTER_CONFIG
from nanodag.model.model_source import fetched, wanted_files
from nanodag.worker.job import Job, MetricsLog, finish, load_job

log = logging.getLogger("nanodag.model.import_model")


def main() -> None:
    job = load_job()
    began = time.monotonic()
    metrics_log = MetricsLog(job)
    metrics_log.write(0, total=1, event="phase", phase="copying", unit="phases")
    metrics = import_model(job)
    metrics_log.write(1, total=1, unit="phases", **metrics)
    metrics_log.close()
    finish(job, metrics=metrics, cost={"work_seconds": time.monotonic() - began})


def import_model(job: Job) -> dict[str, Any]:
    """Copy the model's files into the job's output, and add adapters; returns the architecture and number of bytes."""
    folder, output = fetched(job.config.model, job.mirror), job.output
    adapter = None if job.config.adapter == "none" else fetched(job.config.adapter, job.mirror)
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} has no config.json: it is no model; adapters are named as `adapter`.")
    output.mkdir(exist_ok=True)
    num_bytes = 0
    for path in (path for path in wanted_files(folder) if path.name != ADAPTER_CONFIG):
        shutil.copyfile(path, output / path.name)  # through the hub cache's links to the bytes
        num_bytes += path.stat().st_size
    config = json.loads((output / "config.json").read_text())
    if job.config.model_code != "own":
        from nanodag.model.transformers_class import check_known  # which imports torch

        check_known(output)
        config[MODEL_CODE] = job.config.model_code
        write_json(output / "config.json", config)
    # generation_config.json names what ends a text, the chat template's end of turn included. Without a fast tokenizer,
    # which training and sampling need, the model stays as it is.
    if (output / "tokenizer.json").is_file():
        write_json(output / GENERATION_FILE, generation_config(output, config))
    if adapter is not None:
        from nanodag.model.folder import write_merged  # which imports torch

        write_merged(output, adapter)
    architecture = (config.get("architectures") or ["unknown"])[0]
    log.info("Imported %s from %s: %s, %d bytes", job.config.model, folder, architecture, num_bytes)
    return {"architecture": architecture, "bytes": num_bytes}


if __name__ == "__main__":
    main()
