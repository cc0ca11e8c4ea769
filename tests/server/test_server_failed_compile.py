"""A server one of whose compile processes dies (CCH-2). The next start resumes: tests/engine/test_precompile.py."""

import json
from pathlib import Path

from tests.caches import new_cache
from tests.server.harness import run_to_end

GRAPH = "decode_b2_ctx512"
CONFIG = {"neuron_config": {"num_batched_tokens_buckets": [512], "num_seqs_buckets": [2, 4]}}
EXIT_CODE = 70

SITE = f"""
import os, sys

log = None

def die_while_the_entry_is_written(event, arguments):
    global log
    if event == "open" and "/logs/{GRAPH}" in str(arguments[0]):
        log = arguments[0]
    if event == "os.mkdir" and log is not None:
        os.write(2, b"stand-in compiler: internal error 123\\n")
        os._exit({EXIT_CODE})

if any("pool_worker" in argument for argument in sys.orig_argv):
    sys.addaudithook(die_while_the_entry_is_written)
"""
"""sitecustomize.py of every Python that the server starts: a compile process dies over one graph."""


def entries(cache: Path) -> dict[str, bool]:
    """Graphs in the local cache, and whether all of each entry is there."""
    folder = cache / "neuron" / "compile_cache" / "neuron_native"
    found = {}
    for manifest in folder.glob("*/manifest.json"):
        content = json.loads(manifest.read_text())
        sizes = [file.stat().st_size for file in manifest.parent.iterdir() if file != manifest]
        found[content["graph"]] = content["num_bytes"] in sizes
    return found


def test_server_names_the_graph_whose_compile_process_died_and_keeps_whole_entries_only(
    tiny: Path, tmp_path: Path
) -> None:
    cache, site = new_cache(tmp_path / "cache"), tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    env = {"NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "2", "PYTHONPATH": str(site)}
    code, output = run_to_end(tiny, "neuron_native", tmp_path, cache, config=CONFIG, env=env)
    assert code not in (0, None)
    end = output.splitlines()[-2:]
    assert "The engine has ended: JobFailedError" in end[0] and GRAPH in end[0], end
    assert f"exit code {EXIT_CODE}" in end[0] and ".log" in end[0], end
    assert "stand-in compiler: internal error 123" in end[-1], end
    kept = entries(cache)
    assert kept and GRAPH not in kept and all(kept.values()), kept
