"""The compile cache on a disk that is really full, and on a mount that is really read-only.

Each test mounts in a namespace of its own, which takes root or user namespaces. Where neither is allowed these tests do
not exist; test_cache.py and test_cache_tiers.py inject the same faults.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]

BEGIN = """
import logging, os, subprocess, sys
from pathlib import Path
from tests.engine.test_cache import Compiler, cache_of, get, key_of

root = Path(sys.argv[1])
warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("vllm_neuron").addHandler(handler)
KEYS = [key_of(name) for name in "abc"]


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


def start():
    '''Graphs that a new process compiles; it must get all three of them, whole.'''
    compiler, cache = Compiler(b"graph:" + bytes(40 * 1024)), cache_of(root)
    assert all(get(cache, compiler, key) == compiler.blob.decode() for key in KEYS)
    return compiler.calls
"""

FULL = """
mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root))
assert start() == 3
(warning,) = warnings
assert "No space left on device" in warning and str(root) in warning and "VLLM_CACHE_ROOT" in warning, warning
kept = {path.name for path in (root / "neuron_native").iterdir()} - {"locks"}
assert len(kept) == 1 and kept < {key.digest for key in KEYS}, kept  # two do not fit, and no half of one is left
assert start() == 2
mount("-o", "remount,size=1m", str(root))
assert (start(), start()) == (2, 0)
"""

READ_ONLY = """
if os.environ["FILLED"] == "1":
    assert start() == 3
warnings.clear()
mount("--bind", str(root), str(root))
mount("-o", "remount,bind,ro", str(root))
if os.environ["FILLED"] == "1":
    assert start() == 0
    assert warnings == [], warnings
else:
    assert start() == 3
    (warning,) = warnings
    assert "Read-only file system" in warning and str(root) in warning and "VLLM_CACHE_ROOT" in warning, warning
    assert list(root.iterdir()) == []
"""


def may_mount() -> bool:
    try:
        command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        return False


MOUNTED = {"full": (FULL, ""), "read-only, filled": (READ_ONLY, "1"), "read-only, empty": (READ_ONLY, "0")}


@pytest.mark.parametrize("what", MOUNTED if may_mount() else [])
def test_real_mounted_cache(what: str, tmp_path: Path) -> None:
    program, filled = MOUNTED[what]
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", BEGIN + program, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "FILLED": filled},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
