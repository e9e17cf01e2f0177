"""The hand-written stub says of the extension what the built module says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ALLOWED = """
# pybind11's metaclass cannot be spelled in a stub.
sfs_ext._core.(BatchTime|EmulatedEngine|Ensemble|Fleet|Forest|KvJournalMessage|KvMirror)
sfs_ext._core.(KvObserver|Projection|QualityCalibration|SchedulerConfig|Snapshot)
sfs_ext._core.(Snapshot(Reader|Writer)|StateWriter|VirtualEngine)
sfs_ext._core.(ForecastStatus|ForestMissing|ForestNodeKind|KvEventKind).__pybind11_native_enum__
# There is no constructor; pybind11 refuses at run time.
sfs_ext._core.(KvJournalMessage|Snapshot).__init__
"""


def test_the_stub_agrees_with_the_module(tmp_path: Path) -> None:
    allowlist = tmp_path / "allowlist"
    allowlist.write_text(ALLOWED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "sfs_ext._core", "--allowlist", str(allowlist)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
