"""Waits for the server, is ready after another moment, and stays."""

import os
import sys
import time
import urllib.request
from pathlib import Path

if __name__ == "__main__":
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(os.environ["PREFECT_API_URL"] + "/health", timeout=2)
            break
        except OSError:
            time.sleep(0.05)
    time.sleep(0.3)
    path = Path(sys.argv[1])
    path.with_suffix(".tmp").write_text('{"speedrun": "1", "run_stage": "2", "sweep": "3", "nightly_eval": "4"}')
    path.with_suffix(".tmp").replace(path)
    while True:
        time.sleep(1)
