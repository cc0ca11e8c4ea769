"""A folder of compiled graphs that is carried from one machine to another (NEURON_COMPILED_ARTIFACTS).

It has the layout of a cache, a folder per route, and a file that says that it is one:

    artifacts.json      {"format": 1}
    <route>/...         see `store`
"""

import json
from itertools import islice
from pathlib import Path

from vllm_neuron.compilation.files import write_whole

FORMAT = 1
MARK = "artifacts.json"
_VARIABLE = "NEURON_COMPILED_ARTIFACTS"


class ArtifactsError(RuntimeError):
    """The folder is not one of compiled graphs, and cannot become one."""


def open_artifacts(folder: Path) -> bool:
    """Check a folder, or make one of it if it is empty or not there.

    Returns:
        Whether it was there before: then it is to be read, else it is to be filled.

    Raises:
        ArtifactsError: it holds something else, or is empty and cannot be written to.
    """
    mark = folder / MARK
    try:
        text = mark.read_text()
    except FileNotFoundError:
        _make(folder, mark)
        return False
    except OSError as error:
        raise ArtifactsError(f"{_VARIABLE}={folder} cannot be read ({error}). Correct its permissions.") from error
    try:
        found = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactsError(
            f"{_VARIABLE}={folder}: {MARK} is damaged ({error}). Make the folder anew with vllm-neuron compile."
        ) from error
    if found != FORMAT:
        raise ArtifactsError(
            f"{_VARIABLE}={folder} has format {found}, and this release reads format {FORMAT}. Make the folder anew "
            "with vllm-neuron compile."
        )
    return True


def _make(folder: Path, mark: Path) -> None:
    try:
        names = (path.name for path in folder.iterdir()) if folder.exists() else ()
        others = sorted(islice((name for name in names if not name.startswith(f".{MARK}")), 100))
        if others:
            raise ArtifactsError(
                f"{_VARIABLE}={folder} is not a folder of compiled graphs: it has no {MARK}, but {len(others)} other "
                f"entries such as {others[0]}. Name a folder that vllm-neuron compile has filled, or an empty one."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(mark, json.dumps({"format": FORMAT}) + "\n")
    except OSError as error:
        raise ArtifactsError(
            f"{_VARIABLE}={folder} holds no compiled graphs and cannot be filled ({error}). Name a folder that "
            "vllm-neuron compile has filled, or one that this user can write to."
        ) from error
