"""Where the locks of a cache lie: beside it, unless its file system cannot be trusted with locks."""

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "glusterfs", "fuse.s3fs", "fuse.mount-s3")
"""Kinds on which a lock may not be seen by others, or stay behind when its owner dies."""


@cache
def lock_folder(folder: Path) -> Path:
    """The folder for locks of a cache in ``folder``; on a network file system one of this machine, with a WARNING.

    Entries are whole even without any lock. What is lost is that two machines may compile the same graph.
    """
    kind = file_system(folder)
    if kind not in NETWORK_FILE_SYSTEMS:
        return folder / "locks"
    local = Path(tempfile.gettempdir()) / f"vllm-neuron-locks-{os.getuid()}" / folder.name
    logger.warning(
        "The compile cache %s is on a network file system (%s), where locks are not reliable: they are kept in %s, and "
        "machines that start at the same time may compile the same graphs. Set VLLM_CACHE_ROOT to a local folder and "
        "NEURON_LIBTORCH_REMOTE_CACHE to the shared one.",
        folder,
        kind,
        local,
    )
    return local


def file_system(folder: Path) -> str:
    """Kind of the file system that a folder is on, or will be on, such as "ext4" or "nfs4"."""
    path = folder.absolute()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "unknown")
