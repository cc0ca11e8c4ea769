import subprocess
import sys
from pathlib import Path

import pytest

SERVER = """
import logging, multiprocessing, sys
from vllm_neuron.plugin.last_words import leaving_last_words, repeat_at_exit

@leaving_last_words
def load():
    raise ValueError("the weights are gone")

@leaving_last_words
def clean_up():
    raise OSError("and so is the folder")

def engine():
    try:
        load()
    except ValueError:
        clean_up()

if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    repeat_at_exit()
    if sys.argv[1] == "here":
        engine()
    process = multiprocessing.get_context(sys.argv[1]).Process(target=engine)
    process.start()
    process.join()
    raise RuntimeError("an engine has failed, see somewhere above")
"""


def last_lines(how: str, folder: Path) -> list[str]:
    (folder / "server.py").write_text(SERVER)
    env = {"TMPDIR": str(folder), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "server.py", how], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert [path.name for path in folder.iterdir() if path.name.startswith("vllm-neuron")] == []
    return done.stderr.splitlines()[-2:]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_server_repeats_the_first_cause_of_its_engines_end_last(method: str, tmp_path: Path) -> None:
    assert last_lines(method, tmp_path) == [
        "RuntimeError: an engine has failed, see somewhere above",
        "ERROR The engine has ended: ValueError: the weights are gone",
    ]


def test_engine_in_the_users_own_process_leaves_it_to_the_exception(tmp_path: Path) -> None:
    assert last_lines("here", tmp_path)[-1] == "OSError: and so is the folder"
