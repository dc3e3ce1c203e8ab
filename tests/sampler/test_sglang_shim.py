"""What the shim adds to each process of SGLang's server; with packages of our own in place of SGLang and torch."""

import os
import subprocess
import sys

import psutil
import pytest

from nanodag.engines.sglang_shim import CPU_VARIABLE
from nanodag.engines.start import SHIM
from nanodag.host.folders import PROJECT
from nanodag.inference.server_variables import PARENT_VARIABLE, TOKEN_VARIABLE, server_environment
from tests.fault.processes import is_running, wait_until

# A server spawns its part as SGLang does; what the part imports says who it is, and then takes for ever.
PACKAGES = {
    "sglang/__init__.py": "",
    "sglang/part.py": """
import os, sys, time
from torch.distributed.rendezvous import TCPStore
print(os.getpid(), TCPStore.__name__, flush=True)
time.sleep(600)
""",
    "sglang/launch_server.py": """
import multiprocessing

class Part:
    def __reduce__(self):
        return __import__, ("sglang.part",)

def run_server(options):
    print(options, flush=True)
    multiprocessing.get_context("spawn").Process(target=print, args=(Part(),)).start()
""",
    "sglang/srt/plugins.py": "def load_plugins(): pass",
    "sglang/srt/server_args.py": "prepare_server_args = list",
    "sglang/srt/utils.py": "import time\ndef kill_process_tree(pid, include_parent): time.sleep(600)",
    "torch/__init__.py": "",
    "torch/distributed/__init__.py": "class TCPStore: pass\nfrom torch.distributed.rendezvous import rendezvous",
    "torch/distributed/rendezvous.py": "from torch.distributed import TCPStore\ndef rendezvous(): pass",
}


@pytest.fixture
def server(tmp_path):
    """A server that has begun to start, its first line read."""
    for name, text in PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, **server_environment("secret"), "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(SHIM), "--port=1"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "['--port=1', '--api-key=secret']\n"
        yield process
        process.kill()


def test_a_part_of_a_server_that_is_killed_while_the_part_starts_ends_too(server):
    pid, store = server.stdout.readline().split()
    assert store == "BoundStore"
    inherited = psutil.Process(int(pid)).environ()
    assert inherited[PARENT_VARIABLE] == str(server.pid) and TOKEN_VARIABLE not in inherited
    server.kill()
    server.wait()
    wait_until(lambda: not is_running(int(pid)))


def test_what_sglangs_environment_loads_of_nanodag_needs_the_standard_library_alone():
    code = f"import sys; sys.path.append({str(PROJECT)!r}); import nanodag.inference.server_variables"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.mark.parametrize("is_there", [False, True])
def test_the_path_is_left_as_it_was_but_for_what_others_have_added(tmp_path, is_there):
    added = "import sys; sys.path.append('/added')"
    (tmp_path / "torch.py").write_text(f"from unittest.mock import Mock\nlibrary = Mock()\n{added}\n")
    code = f"import sys, runpy; before = list(sys.path); runpy.run_path({str(SHIM)!r}, run_name='part')\n"
    code += "assert sys.path == [*before, '/added'], sys.path"
    path = os.pathsep.join([str(tmp_path), *([str(PROJECT)] if is_there else [])])
    environment = {"PYTHONPATH": path, CPU_VARIABLE: "1"}
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=tmp_path, env=environment)
