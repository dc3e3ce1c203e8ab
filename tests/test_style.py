import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def test_ruff_has_nothing_to_say():
    found = subprocess.run(
        [str(Path(sys.prefix) / "bin" / "ruff"), "check", "--no-cache", "."],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout


def test_speedrun_sh_stays_a_hand_over():
    assert len((PROJECT / "speedrun.sh").read_text().splitlines()) <= 30


def test_constraints_name_no_place():
    for line in (PROJECT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or line.count("==") == 1, line
        assert "/" not in line and "@" not in line, line
