"""Artifacts, local cache and remote cache together: who is asked first, who is given what, and what may fail."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.test_cache import KEY, OTHER, Compiler, get, load
from vllm_neuron.compilation.artifacts import ArtifactsError, open_artifacts
from vllm_neuron.compilation.cache import CacheFolders, CompileCache, Kept, TierName
from vllm_neuron.compilation.key import GraphKey
from vllm_neuron.compilation.store import EntryStore

TIERS: tuple[TierName, ...] = ("artifacts", "local", "remote")


def cache_in(root: Path, *tiers: TierName) -> CompileCache:
    return CompileCache(CacheFolders(**{tier: root / tier for tier in tiers}), "neuron_native")


def kept(cache: CompileCache, compiler: Compiler, key: GraphKey = KEY) -> Kept[str]:
    return cache.get_or_compile(key, "decode_b1", "LlamaForCausalLM", load, compiler)


def has(root: Path, tier: TierName, key: GraphKey = KEY) -> bool:
    return EntryStore(root / tier / "neuron_native").has(key.digest)


def test_what_is_compiled_is_written_to_every_tier(tmp_path: Path) -> None:
    assert kept(cache_in(tmp_path, *TIERS), Compiler()).source == "compiled"
    assert all(has(tmp_path, tier) for tier in TIERS)


@pytest.mark.parametrize("tier", TIERS)
def test_the_first_tier_that_has_it_is_named(tmp_path: Path, tier: TierName) -> None:
    kept(cache_in(tmp_path, tier), Compiler())
    compiler = Compiler()
    assert kept(cache_in(tmp_path, *TIERS), compiler).source == tier
    assert compiler.calls == 0


def test_a_remote_hit_is_copied_to_this_machine_and_into_the_artifacts(tmp_path: Path) -> None:
    kept(cache_in(tmp_path, "remote"), Compiler())
    cache_in(tmp_path, "remote").note("fingerprint", KEY.digest, "decode_b1")
    cache = cache_in(tmp_path, *TIERS)
    assert cache.indexed_key("fingerprint") == KEY.digest
    assert kept(cache, Compiler()).source == "remote"
    cache.note("fingerprint", KEY.digest, "decode_b1")
    for tier in ("artifacts", "local"):
        assert has(tmp_path, tier)
        assert cache_in(tmp_path, tier).indexed_key("fingerprint") == KEY.digest


def test_a_local_hit_fills_the_artifacts_but_is_not_published(tmp_path: Path) -> None:
    kept(cache_in(tmp_path, "local"), Compiler())
    assert kept(cache_in(tmp_path, *TIERS), Compiler()).source == "local"
    assert has(tmp_path, "artifacts")
    assert not has(tmp_path, "remote")


@pytest.mark.parametrize("tier", ["artifacts", "remote"])
def test_a_damaged_entry_elsewhere_is_named_once_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: TierName
) -> None:
    kept(cache_in(tmp_path, tier), Compiler())
    blob = tmp_path / tier / "neuron_native" / KEY.digest / "blob"
    blob.write_bytes(b"graph:2")
    cache = cache_in(tmp_path, *TIERS)
    assert kept(cache, Compiler()).source == "compiled"
    assert kept(cache, Compiler()).source == ("local" if tier == "artifacts" else "artifacts")
    (record,) = caplog.records
    assert str(blob.parent) in record.getMessage()
    assert "does not match its checksum" in record.getMessage()
    assert blob.read_bytes() == b"graph:2"


@pytest.mark.parametrize("tier", ["artifacts", "remote"])
def test_what_another_machine_is_writing_is_left_alone(tmp_path: Path, tier: TierName) -> None:
    """Its writers hold locks of their own machines only."""
    writing = tmp_path / tier / "neuron_native" / f".{KEY.digest}.of-another-machine"
    writing.mkdir(parents=True)
    assert kept(cache_in(tmp_path, *TIERS), Compiler()).source == "compiled"
    assert writing.is_dir()


def test_entries_that_were_swapped_are_told_apart_by_their_manifests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for key in (KEY, OTHER):
        kept(cache_in(tmp_path, "artifacts"), Compiler(), key)
    folder = tmp_path / "artifacts" / "neuron_native"
    (folder / KEY.digest).rename(folder / "aside")
    (folder / OTHER.digest).rename(folder / KEY.digest)
    (folder / "aside").rename(folder / OTHER.digest)
    assert kept(cache_in(tmp_path, "artifacts", "local"), Compiler()).source == "compiled"
    assert f"it holds graph decode_b1 of key {OTHER.digest}" in caplog.text


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("fault", [_full, _read_only])
def test_tiers_that_cannot_be_written_warn_once_each_and_stop_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    monkeypatch.setattr(EntryStore, "write", fault)
    monkeypatch.setattr(EntryStore, "write_index", fault)
    cache, compiler = cache_in(tmp_path, *TIERS), Compiler()
    for key in (KEY, OTHER):
        assert kept(cache, compiler, key).source == "compiled"
        cache.note("fingerprint", key.digest, "decode_b1")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(TIERS)
    for tier, variable in zip(
        TIERS, ("NEURON_COMPILED_ARTIFACTS", "VLLM_CACHE_ROOT", "NEURON_LIBTORCH_REMOTE_CACHE"), strict=True
    ):
        assert any(str(tmp_path / tier) in warning and variable in warning for warning in warnings)


def test_read_only_artifacts_are_used_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(cache_in(tmp_path, "artifacts"), Compiler())
    for method in ("write", "write_index", "remove"):
        monkeypatch.setattr(EntryStore, method, _read_only)
    assert open_artifacts_of(tmp_path)
    assert kept(cache_in(tmp_path, "artifacts", "local"), Compiler()).source == "artifacts"
    assert caplog.records == []


def open_artifacts_of(root: Path) -> bool:
    (root / "artifacts" / "artifacts.json").write_text('{"format": 1}')
    return open_artifacts(root / "artifacts")


def test_a_tier_that_cannot_be_read_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = CompileCache(CacheFolders(local=tmp_path / "local", remote=blocked / "below"), "neuron_native")
    assert get(cache, Compiler()) == "graph:1"
    assert get(cache, Compiler()) == "graph:1"
    (record,) = caplog.records
    assert "NEURON_LIBTORCH_REMOTE_CACHE" in record.getMessage()


def test_a_miss_tells_what_the_nearest_entry_differs_in(tmp_path: Path) -> None:
    cache = cache_in(tmp_path, *TIERS)
    assert "no graph of this route yet" in cache.why_missing(KEY, "decode_b1")
    kept(cache, Compiler())
    newer = GraphKey(**{**vars(KEY), "versions": {"torch": "2.10.0"}})
    assert "decode_b1" in cache.why_missing(newer, "decode_b1")
    assert "versions.torch: 2.10.0 here, 2.9.1 there" in cache.why_missing(newer, "decode_b1")


# --- the folder of artifacts itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_folder_is_to_be_filled_and_then_read(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "artifacts"
    if exists:
        folder.mkdir()
    assert open_artifacts(folder) is False
    assert json.loads((folder / "artifacts.json").read_text()) == {"format": 1}
    assert open_artifacts(folder) is True
    assert [path.name for path in folder.iterdir()] == ["artifacts.json"]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ArtifactsError, match=r"not a folder of compiled graphs.* 1 other entries such as model\.safet"):
        open_artifacts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "damaged"), ("[1]", "damaged"), ("{}", "damaged"), ('{"format": 2}', "has format 2, and this release reads")],
)
def test_a_mark_that_is_not_ours_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "artifacts.json").write_text(text)
    with pytest.raises(ArtifactsError, match=message):
        open_artifacts(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactsError, match=r"NEURON_COMPILED_ARTIFACTS=.*can"):
        open_artifacts(tmp_path / "file" / "artifacts")
