"""kill -9 while graphs are compiled and stored: whatever the moment, the next start is right.

Moments are counted in calls that the code of compilation/ makes, not in seconds: so they spread over all stages of
compiling and storing on any machine, however loaded.
"""

import subprocess
import sys
from pathlib import Path

MOMENTS = 20

PROGRAM = f"""
import os, random, signal, sys
from pathlib import Path
import torch
from vllm_neuron import compilation
from tests.engine.fixtures import NUM_BLOCKS, SMALL, tiny_model
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.compilation.store import EntryStore
from vllm_neuron.engine.compiler import GraphCompiler
from vllm_neuron.engine.graphs import list_graphs
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route

torch.set_num_threads(1)
graphs = list_graphs(SMALL)


def compile_all(root):
    route = select_route("neuron_native", CPU)
    cache = CompileCache(CacheFolders(root / "local", root / "artifacts", root / "remote"), route.name)
    compiler = GraphCompiler(tiny_model(num_hidden_layers=1), SMALL, route, cache, torch.float32, NUM_BLOCKS)
    return [compiler.compile(graph) for graph in graphs], cache


def calls_counted(work, last=None):
    # How many calls to and from the code of compilation/ `work` makes; this process is killed at number `last`.
    (folder,) = compilation.__path__
    count = 0

    def count_calls(frame, event, _):
        nonlocal count
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(folder):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count_calls)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


reference, _ = compile_all(Path(sys.argv[1]) / "first")
calls = calls_counted(lambda: compile_all(Path(sys.argv[1]) / "again"))
rng = random.Random(0)
for number in range({MOMENTS}):
    root = Path(sys.argv[1]) / str(number)
    moment = rng.randrange(calls * number // {MOMENTS}, calls * (number + 1) // {MOMENTS}) + 1
    child = os.fork()
    if child == 0:
        calls_counted(lambda: compile_all(root), moment)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"not killed at call {{moment}} of {{calls}}"
    found = {{}}
    for tier in ("local", "artifacts", "remote"):
        store = EntryStore(root / tier / "neuron_native")
        for entry in store.entries():
            found[tier] = found.get(tier, 0) + (store.read(entry.path.name) is not None)  # raises if it is damaged
    compiled, cache = compile_all(root)
    assert [one.executable.source for one in compiled] == [one.executable.source for one in reference]
    assert sum(one.source != "compiled" for one in compiled) >= max(found.values(), default=0), (compiled, found)
    repeated, _ = compile_all(root)
    assert all(one.source == "artifacts" for one in repeated), repeated
    print(number, found)
"""


def test_next_start_is_right_whenever_the_one_before_was_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == MOMENTS
    assert len({line.split(" ", 1)[1] for line in lines}) > 2, "the kills all came at the same stage"
