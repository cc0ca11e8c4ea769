"""The local compile cache: once per graph, whole entries only, and never in the way of a start."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.compilation.key import GraphKey
from vllm_neuron.compilation.store import Entry, EntryStore, Manifest

VERSIONS = {"torch": "2.9.1"}


def key_of(graph: str) -> GraphKey:
    return GraphKey(graph, (), "neuron_native", "x86", {}, VERSIONS, (), "", {})


KEY, OTHER = key_of("a"), key_of("b")


def load(blob: bytes) -> str:
    if not blob.startswith(b"graph:"):
        raise ValueError("not a graph of this route")
    return blob.decode()


class Compiler:
    """Counts its calls."""

    def __init__(self, blob: bytes = b"graph:1") -> None:
        self.blob = blob
        self.calls = 0

    def __call__(self) -> tuple[str, bytes]:
        self.calls += 1
        return self.blob.decode(), self.blob


def cache_of(root: Path | None) -> CompileCache:
    return CompileCache(CacheFolders(local=root), "neuron_native")


def get(cache: CompileCache, compiler: Callable[[], tuple[str, bytes]], key: GraphKey = KEY) -> str:
    return cache.get_or_compile(key, "decode_b1", "LlamaForCausalLM", load, compiler).value


def fetch(cache: CompileCache, key: GraphKey = KEY) -> str | None:
    kept = cache.fetch(key.digest, load)
    return None if kept is None else kept.value


def entry(root: Path) -> Path:
    return root / "neuron_native" / KEY.digest


def test_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    compiler = Compiler()
    assert get(cache_of(tmp_path), compiler) == "graph:1"
    assert get(cache_of(tmp_path), compiler) == "graph:1"
    assert fetch(cache_of(tmp_path)) == "graph:1"
    assert compiler.calls == 1
    manifest = json.loads((entry(tmp_path) / "manifest.json").read_text())
    assert manifest["graph"] == "decode_b1"
    assert manifest["model"] == "LlamaForCausalLM"
    assert manifest["key"] == KEY.digest
    assert manifest["parts"] == KEY.parts()
    assert manifest["num_bytes"] == 7
    assert len(manifest["sha256"]) == 64
    assert manifest["compile_seconds"] >= 0


def test_routes_never_share_an_entry(tmp_path: Path) -> None:
    compiler = Compiler()
    for route in ("neuron_native", "vllm_neuron"):
        get(CompileCache(CacheFolders(local=tmp_path), route), compiler)
    assert compiler.calls == 2


def test_disabled_cache_neither_reads_nor_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiler = Compiler()
    for _ in range(2):
        cache = cache_of(None)
        assert get(cache, compiler) == "graph:1"
        cache.note("f", KEY.digest, "g")
        assert cache.indexed_key("f") is None
        assert fetch(cache) is None
    assert compiler.calls == 2
    assert list(tmp_path.iterdir()) == []


def _flip_a_byte(folder: Path) -> None:
    (folder / "blob").write_bytes(b"graph:2")


def _cut_the_blob(folder: Path) -> None:
    (folder / "blob").write_bytes(b"graph")


def _lose_the_blob(folder: Path) -> None:
    (folder / "blob").unlink()


def _lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _cut_the_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _rename_manifest_fields(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"graph": "g"}')


def _put_another_graph_there(folder: Path) -> None:
    manifest = Manifest.of(b"graph:other", "other", "LlamaForCausalLM", OTHER.digest, OTHER.parts(), 1.0)
    EntryStore(folder.parent).write(Entry(manifest, b"graph:other"))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    (folder.parent / OTHER.digest).rename(folder)


@pytest.mark.parametrize(
    "damage",
    [
        _flip_a_byte,
        _cut_the_blob,
        _lose_the_blob,
        _lose_the_manifest,
        _cut_the_manifest,
        _rename_manifest_fields,
        _put_another_graph_there,
    ],
)
def test_damaged_entry_is_reported_removed_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    compiler = Compiler()
    get(cache_of(tmp_path), compiler)
    damage(entry(tmp_path))
    assert fetch(cache_of(tmp_path)) is None
    with caplog.at_level(logging.WARNING):
        assert get(cache_of(tmp_path), compiler) == "graph:1"
    assert compiler.calls == 2
    (record,) = caplog.records
    assert f"removing the entry {entry(tmp_path)}" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert get(cache_of(tmp_path), compiler) == "graph:1"
    assert compiler.calls == 2


def test_entry_that_the_route_cannot_load_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Compiler(b"an older format"), Compiler()
    get(cache_of(tmp_path), old)
    assert get(cache_of(tmp_path), new) == "graph:1"
    assert "not a graph of this route" in caplog.text
    assert get(cache_of(tmp_path), new) == "graph:1"
    assert (old.calls, new.calls) == (1, 1)


def test_failed_compile_leaves_no_entry_and_no_lock(tmp_path: Path) -> None:
    def fail() -> tuple[str, bytes]:
        raise RuntimeError("compiler exited with 70")

    with pytest.raises(RuntimeError, match="exited with 70"):
        get(cache_of(tmp_path), fail)
    assert not entry(tmp_path).exists()
    compiler = Compiler()
    get(cache_of(tmp_path), compiler)
    assert compiler.calls == 1


COMPILE_SLOWLY = """
import os, sys, time
from pathlib import Path
from tests.engine.test_cache import cache_of, get

root, seconds = Path(sys.argv[1]), float(sys.argv[2])

def compile_():
    with open(root / "compiles", "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(seconds)
    return "graph:1", b"graph:1"

assert get(cache_of(root), compile_) == "graph:1"
"""


def start_compiling(root: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", COMPILE_SLOWLY, str(root), str(seconds)])


def compiles(root: Path) -> list[str]:
    log = root / "compiles"
    return log.read_text().split() if log.exists() else []


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    processes = [start_compiling(tmp_path, 0.5) for _ in range(3)]
    assert [process.wait(240) for process in processes] == [0] * 3
    assert len(compiles(tmp_path)) == 1


def test_process_killed_half_way_leaves_no_entry_and_holds_no_lock(tmp_path: Path) -> None:
    owner = start_compiling(tmp_path, 600)
    deadline = time.monotonic() + 240
    while not compiles(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    waiter = start_compiling(tmp_path, 0)
    time.sleep(0.5)
    assert waiter.poll() is None, "the waiter waits for the owner"
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(10)
    assert not entry(tmp_path).exists()
    assert waiter.wait(240) == 0
    assert len(compiles(tmp_path)) == 2
    assert fetch(cache_of(tmp_path)) == "graph:1"


def test_leftovers_of_a_killed_writer_are_swept_and_never_read(tmp_path: Path) -> None:
    leftover = tmp_path / "neuron_native" / f".{KEY.digest}.killed"
    leftover.mkdir(parents=True)
    (leftover / "blob").write_bytes(b"graph:half")
    compiler = Compiler()
    assert get(cache_of(tmp_path), compiler) == "graph:1"
    assert sorted(path.name for path in (tmp_path / "neuron_native").iterdir()) == [KEY.digest, "locks"]


def test_entry_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.write_text

    def full_disk(path: Path, *args: object, **kwargs: object) -> int:
        if path.name == "manifest.json":
            raise OSError(28, "No space left on device")
        return original(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full_disk)
    compiler = Compiler()
    assert get(cache_of(tmp_path), compiler) == "graph:1"
    assert [path.name for path in (tmp_path / "neuron_native").iterdir()] == ["locks"]


def test_cache_that_cannot_be_written_warns_once_and_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A file where the folder should be: no permission of any user gets around it.
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache, compiler = cache_of(blocked), Compiler()
    for key in (KEY, OTHER):
        assert get(cache, compiler, key) == "graph:1"
        cache.note("fingerprint", key.digest, "g")
        assert cache.indexed_key("fingerprint") is None
    assert compiler.calls == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(blocked) in record.getMessage()
    assert "VLLM_CACHE_ROOT" in record.getMessage()


def test_read_only_cache_still_hits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(cache_of(tmp_path), Compiler())

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    for method in ("write", "remove", "write_index"):
        monkeypatch.setattr(EntryStore, method, refuse)
    compiler = Compiler()
    assert get(cache_of(tmp_path), compiler) == "graph:1"
    assert compiler.calls == 0
    assert caplog.records == []


def test_index_notes_keys_and_survives_damage(tmp_path: Path) -> None:
    cache_of(tmp_path).note("fingerprint", KEY.digest, "g")
    assert cache_of(tmp_path).indexed_key("fingerprint") == KEY.digest
    assert cache_of(tmp_path).indexed_key("another") is None
    for text in ("", "{", "[]", '{"graph": "g"}', '"x"'):
        (tmp_path / "neuron_native" / "index" / "fingerprint").write_text(text)
        assert cache_of(tmp_path).indexed_key("fingerprint") is None
    cache_of(tmp_path).note("fingerprint", OTHER.digest, "g")
    assert cache_of(tmp_path).indexed_key("fingerprint") == OTHER.digest
