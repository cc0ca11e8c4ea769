"""Where locks lie."""

import logging
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vllm_neuron.compilation.locks import file_system, lock_folder


@pytest.fixture(autouse=True)
def mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a shared folder, and a local disk mounted below it."""
    kinds = {"/": "ext4", "/shared": "nfs4", "/shared/scratch": "xfs"}
    listed = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in kinds.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: listed)
    lock_folder.cache_clear()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/", "ext4"), ("/var/x", "ext4"), ("/shared", "nfs4"), ("/shared/a/b", "nfs4"), ("/shared/scratch/a", "xfs")],
)
def test_the_innermost_mount_counts(folder: str, kind: str) -> None:
    assert file_system(Path(folder)) == kind


def test_on_a_local_disk_locks_lie_beside_the_entries(caplog: pytest.LogCaptureFixture) -> None:
    assert lock_folder(Path("/shared/scratch/neuron_native")) == Path("/shared/scratch/neuron_native/locks")
    assert caplog.records == []


def test_on_a_network_file_system_locks_stay_on_this_machine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for _ in range(2):
        assert tmp_path in lock_folder(Path("/shared/cache/neuron_native")).parents
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "nfs4" in record.getMessage()
    assert "NEURON_LIBTORCH_REMOTE_CACHE" in record.getMessage()
