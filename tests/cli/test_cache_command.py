"""`vllm-neuron cache`: what lies in a folder of compiled graphs, what is damaged, and what may go."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from vllm_neuron.cli.main import app
from vllm_neuron.compilation.artifacts import open_artifacts
from vllm_neuron.compilation.store import Entry, EntryStore, Manifest

ROUTES = ("neuron_native", "vllm_neuron")
HOUR = 3600
DAY = 24 * HOUR


def cache(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)], catch_exceptions=False)


def key(digit: str) -> str:
    return digit * 64


def add(root: Path, digit: str, age_days: float = 0, size: int = 1_000_000, route: str = ROUTES[0]) -> Path:
    """An entry that was last used some time ago, and an index file that leads to it."""
    store = EntryStore(root / route)
    blob = digit.encode() * size
    manifest = Manifest.of(blob, f"decode_b{digit}", "LlamaForCausalLM", key(digit), {}, 1.5)
    store.write(Entry(manifest, blob))
    store.write_index(f"fingerprint-{digit}", key(digit), manifest.graph)
    used = time.time() - age_days * DAY
    entry = root / route / key(digit)
    for path in (*entry.iterdir(), entry):
        os.utime(path, (used, used))
    return entry


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The local cache: four graphs of a megabyte, used three, two, one and no days ago."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    root = tmp_path / "cache" / "neuron" / "compile_cache"
    for age, digit in ((3, "1"), (2, "2"), (1, "3")):
        add(root, digit, age)
    add(root, "4", route=ROUTES[1])
    yield root


def left(root: Path) -> str:
    """First digits of the entries there are."""
    return "".join(sorted(path.name[0] for route in ROUTES for path in (root / route).glob("[0-9]" * 64)))


def test_ls_names_each_graph_and_sums_them_up(root: Path) -> None:
    result = cache("ls")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "decode_b" in line]
    assert [line.split()[1] for line in lines] == ["decode_b4", "decode_b3", "decode_b2", "decode_b1"], (
        "last used first"
    )
    for word in ("vllm_neuron", "LlamaForCausalLM", "444444444444 ", "1.00", "1.50"):
        assert word in lines[0]
    assert f"4 graphs, 4.00 MB in {root}" in result.stdout


def test_ls_of_a_cache_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "absent"))
    assert cache("ls").stdout.startswith("0 graphs, 0.00 MB in ")
    assert cache("verify").exit_code == 0
    assert cache("rm", "--all").exit_code == 0
    assert not (tmp_path / "absent").exists()


def test_ls_lists_what_does_not_belong_there(root: Path) -> None:
    (root / ROUTES[0] / "notes").mkdir()
    (root / ROUTES[0] / "locks").mkdir()
    (root / ROUTES[0] / "README").write_text("mine")
    (root / "other_route").mkdir()
    found = [line.removeprefix("foreign: ") for line in cache("ls").stdout.splitlines() if line.startswith("foreign")]
    assert found == [str(root / "other_route"), str(root / ROUTES[0] / "README"), str(root / ROUTES[0] / "notes")]


def test_ls_as_json(root: Path) -> None:
    (root / ROUTES[1] / key("4") / "manifest.json").write_text("{")
    found = json.loads(cache("ls", "--json").stdout)
    assert (found["folder"], found["foreign"]) == (str(root), [])
    assert [(entry["route"], entry["key"], entry["graph"]) for entry in found["entries"]] == [
        (ROUTES[0], key("1"), "decode_b1"),
        (ROUTES[0], key("2"), "decode_b2"),
        (ROUTES[0], key("3"), "decode_b3"),
        (ROUTES[1], key("4"), None),
    ]
    assert abs(time.time() - 3 * DAY - found["entries"][0]["used"]) < 60


def test_another_folder_is_worked_on_when_it_is_named(root: Path, tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    open_artifacts(artifacts)
    add(artifacts, "7")
    listed = cache("ls", "--folder", artifacts).stdout
    assert "decode_b7" in listed and "foreign" not in listed and "1 graphs" in listed
    assert cache("rm", "--all", "--folder", artifacts).exit_code == 0
    assert left(artifacts) == "" and left(root) == "1234"
    assert open_artifacts(artifacts), "it is a folder of artifacts still"
    absent = cache("ls", "--folder", tmp_path / "absent")
    assert absent.exit_code == 1
    assert (
        absent.stderr
        == f"Error: --folder={tmp_path / 'absent'}: no such folder. Name one that has subfolders of routes.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "remaining"),
    [
        (["1" * 6, "4" * 64], "23"),
        (["--all"], ""),
        (["--older-than", 1.5], "34"),
        (["--older-than", 30], "1234"),
        (["--max-size", 0.0021], "34"),
        (["--max-size", 1], "1234"),
        (["--max-size", 0], ""),
    ],
)
def test_rm_removes_what_was_chosen(root: Path, arguments: list[object], remaining: str) -> None:
    planned = cache("rm", "--dry-run", *arguments)
    assert left(root) == "1234" and "would remove: " in planned.stdout
    done = cache("rm", *arguments)
    assert done.exit_code == 0
    assert left(root) == remaining
    gone = 4 - len(remaining)
    assert f"removed: {gone} graphs, 0 leftovers, {gone} index files; {gone:.2f} MB" in done.stdout
    assert done.stdout == planned.stdout.replace("would remove", "removed")
    assert all(EntryStore(root / route).read(path.name) for route in ROUTES for path in (root / route).glob("?" * 64))


def test_rm_counts_a_read_as_a_use(root: Path) -> None:
    EntryStore(root / ROUTES[0]).read(key("1"))
    cache("verify")
    cache("rm", "--max-size", 0.0021)
    assert left(root) == "14", "checking is no use"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Say what to remove, in one way"),
        (["--all", "111111"], "Say what to remove, in one way"),
        (["11111"], "11111: give 6 or more digits of a key"),
        (["555555"], "555555: no graph has such a key"),
    ],
)
def test_rm_removes_nothing_when_the_choice_is_not_clear(root: Path, arguments: list[str], message: str) -> None:
    result = cache("rm", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {message}") and result.stdout == ""
    assert left(root) == "1234"


def test_rm_clears_up_after_processes_that_died_but_not_after_those_that_live(root: Path) -> None:
    store = EntryStore(root / ROUTES[0])
    old, young = (root / ROUTES[0] / f".{key(digit)}.x" for digit in "89")
    for folder, age in ((old, 2 * HOUR), (young, 60)):
        folder.mkdir()
        (folder / "blob").write_bytes(b"x" * 1_000_000)
        for path in (folder / "blob", folder):
            os.utime(path, (time.time() - age,) * 2)
    store.write_index("fingerprint-of-nothing", key("8"), "decode_b8")
    lock = store.folder / "locks" / f"{key('1')}.lock"
    lock.parent.mkdir()
    lock.touch()
    assert f"leftover of a process that died: {old}" in cache("verify").stdout
    result = cache("rm", "--older-than", 30)
    assert "removed: 0 graphs, 1 leftovers, 1 index files; 1.00 MB" in result.stdout
    assert young.exists() and not old.exists() and lock.exists()
    assert store.read_index("fingerprint-of-nothing") is None and store.read_index("fingerprint-1") == key("1")


def test_verify_names_each_damaged_graph_and_why(root: Path) -> None:
    route = root / ROUTES[0]
    (route / key("1") / "blob").write_bytes(b"other")
    (route / key("2") / "manifest.json").write_text("{")
    (root / ROUTES[1] / key("4")).rename(root / ROUTES[1] / key("5"))
    result = cache("verify")
    assert result.exit_code == 1
    damaged = [line for line in result.stdout.splitlines() if line.startswith("damaged: ")]
    assert [line.split(": ")[1] for line in damaged] == [
        str(route / key("1")),
        str(route / key("2")),
        str(root / ROUTES[1] / key("5")),
    ]
    for line, why in zip(damaged, ("checksum", "manifest.json is damaged", f"of key {key('4')}"), strict=True):
        assert why in line
    assert "4 graphs in" in result.stdout and "3 damaged, 0 leftovers" in result.stdout
    assert left(root) == "1235"


def test_verify_removes_damaged_graphs_only_when_told(root: Path) -> None:
    (root / ROUTES[0] / key("2") / "blob").unlink()
    result = cache("verify", "--remove")
    assert result.exit_code == 1 and "1 damaged, 0 leftovers (removed)" in result.stdout
    assert left(root) == "134"
    assert cache("verify").exit_code == 0


def test_what_cannot_be_written_to_is_an_error_in_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EntryStore, key: str) -> None:
        raise PermissionError(13, "Permission denied", str(self.folder / key))

    monkeypatch.setattr(EntryStore, "remove", refuse)
    result = cache("rm", "--all")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: [Errno 13] Permission denied: ") and result.stderr.count("\n") == 1
