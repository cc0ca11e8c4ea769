"""Servers do not outlive the tests that started them."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

TESTS = """
import sys, time
from pathlib import Path
from tests.server.harness import start

folder = Path(sys.argv[1])
child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
print(start([sys.executable, "-c", child], 0, folder, folder, {}).process.pid, flush=True)
time.sleep(600)
"""


def test_killed_tests_leave_no_process(tmp_path: Path) -> None:
    tests = subprocess.Popen([sys.executable, "-c", TESTS, tmp_path], stdout=subprocess.PIPE, text=True)
    assert tests.stdout is not None
    server = psutil.Process(int(tests.stdout.readline()))
    try:
        while not server.children():
            time.sleep(0.05)
        processes = [server, *server.children()]
    finally:
        tests.kill()
        tests.wait()
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left
