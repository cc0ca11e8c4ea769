"""A process whose parent is killed ends too, with whatever it has started."""

import os
import signal
import subprocess
import sys
import time

import psutil

PARENT = """
import multiprocessing, subprocess, sys, time

def child(pipe):
    from vllm_neuron.plugin.watchdog import watch_parent
    watch_parent()
    compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pipe.send((multiprocessing.current_process().pid, compiler.pid))
    time.sleep(600)

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("{method}").Process(target=child, args=(theirs,)).start()
    print(*ours.recv(), flush=True)
    time.sleep(600)
"""


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_children_of_a_killed_process_end(tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "parent.py")
    with open(script, "w") as file:
        file.write(PARENT.replace("{method}", "spawn"))
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(1.5)
    assert len(pids) == 2 and not any(map(gone, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(map(gone, pids))
