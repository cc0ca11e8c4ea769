"""Every code block of the documentation runs, or says why it cannot run here.

Blocks marked bash, python or json count; others are output to look at. An HTML comment before a block says how to
treat it, and without one it must simply succeed, in a scratch folder where `demo` is the demo model with two of its
layers (`make serve` serves the whole model):

    <!-- serves -->              starts a server (`vllm serve` or `make serve`), which blocks below it may ask
    <!-- asks -->                talks to the server of the block above it, on port 8000 in the text
    <!-- needs: hardware -->     is not run: it needs Neuron devices or Neuron's packages
    <!-- not run: reason -->     is not run, for the reason given
    <!-- excerpt of PATH -->     is not run: it stands in that file, word for word, and is run or tested there
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.caches import new_cache
from tests.server.harness import BIN, Server, clean_environment, free_port, start

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
LANGUAGES = ("bash", "python", "json", "toml")
LAYERS = 2

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--\s*((?:(?!-->).)*?)\s*-->\s*\Z", re.DOTALL)
EXCERPT = re.compile(r"excerpt of (\S+)")
NOT_RUN = re.compile(r"(?:needs|not run):\s*\S.{4,}", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        document: file it is in.
        line: of its fence.
        language: of the fence.
        text: its content.
        mark: the comment before it, or "".
    """

    document: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(REPOSITORY)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    found = []
    for fence in FENCE.finditer(text):
        comment = COMMENT.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(document, line, fence[1], fence[2], comment[1] if comment else ""))
    return [block for block in found if block.language in LANGUAGES]


def with_mark(*marks: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document) if block.mark in marks]


def conversations() -> list[list[Block]]:
    """Each block that serves, with those below it that ask."""
    found: list[list[Block]] = []
    for block in with_mark("serves", "asks"):
        if block.mark == "serves":
            found.append([block])
        else:
            assert found and found[-1][0].document == block.document, f"{block}: no server above it"
            found[-1].append(block)
    return found


@pytest.fixture(scope="module")
def shallow_demo(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model without most of its layers: no block's success depends on what the model says."""
    folder = tmp_path_factory.mktemp("shallow") / "demo"
    shutil.copytree(demo_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    weights = load_file(demo_model / "model.safetensors")
    shallow = {name: value for name, value in weights.items() if layer_of(name) < LAYERS}
    save_file(shallow, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def layer_of(name: str) -> int:
    """Number of the layer that a weight belongs to; 0 if to none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else 0


@pytest.fixture
def scratch(tmp_path: Path, shallow_demo: Path) -> Path:
    (tmp_path / "demo").symlink_to(shallow_demo)
    new_cache(tmp_path / "cache")
    return tmp_path


def run(block: Block, folder: Path, text: str) -> str:
    """Output of a block, which must succeed."""
    if block.language == "json":
        return json.dumps(json.loads(text))
    command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "bash" else [sys.executable, "-c", text]
    env = clean_environment() | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "VLLM_NEURON_CPU_MODE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_mark_is_known_and_every_reason_is_given() -> None:
    for document in DOCUMENTS:
        for block in blocks(document):
            known = (
                block.mark in ("", "serves", "asks") or NOT_RUN.fullmatch(block.mark) or EXCERPT.fullmatch(block.mark)
            )
            assert known, f"{block}: {block.mark!r}"


def test_excerpts_are_what_they_are_taken_from() -> None:
    for document in DOCUMENTS:
        for block in blocks(document):
            if excerpt := EXCERPT.fullmatch(block.mark):
                assert block.text in (REPOSITORY / excerpt[1]).read_text(), f"{block}: not in {excerpt[1]}"


@pytest.mark.parametrize("block", with_mark(""), ids=str)
def test_real_block_succeeds(block: Block, scratch: Path) -> None:
    run(block, scratch, block.text)


@pytest.fixture
def served(request: pytest.FixtureRequest, scratch: Path) -> Iterator[tuple[Server, list[Block]]]:
    first, *others = request.param
    port = free_port()
    text, made = re.subn(
        r"\bmake serve\b", f"make -C '{REPOSITORY}' {_make_arguments(port)} serve", first.text.rstrip()
    )
    if not made:
        assert "vllm serve" in text, f"{first}: starts no server"
        text += f" --port {port}"
    server = start(["bash", "-euo", "pipefail", "-c", text], port, scratch, scratch / "cache", {})
    try:
        server.wait_ready()
        yield server, others
    except BaseException:
        server.kill_all()
        raise
    server.stop_group()


def _make_arguments(port: int) -> str:
    """Use this environment as it is, whatever its stamps say."""
    stamps = (f"{sys.prefix}/.vllm-neuron-{stamp}" for stamp in ("made", "demo"))
    return " ".join((f"VENV='{sys.prefix}' PORT={port}", *(f"--assume-old='{stamp}'" for stamp in stamps)))


@pytest.mark.parametrize("served", conversations(), indirect=True, ids=lambda found: str(found[0]))
def test_server_blocks_serve_and_answer(served: tuple[Server, list[Block]], scratch: Path) -> None:
    server, others = served
    for block in others:
        output = run(block, scratch, block.text.replace(":8000", f":{server.port}"))
        assert output.strip() and '"error"' not in output, f"{block}\n{output}"


def headings(document: Path) -> set[str]:
    """Anchors of a document, as GitHub and the site make them."""
    lines = FENCE.sub("", document.read_text()).splitlines()
    texts = (line.lstrip("#").strip().lower() for line in lines if re.match(r"#{1,6} ", line))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\- ]", "", text)) for text in texts}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", document.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


def test_documents_that_the_code_names_are_there() -> None:
    """Errors name the section that says more."""
    for source in sorted((REPOSITORY / "src").rglob("*.py")):
        for path, anchor in re.findall(r"(docs/[\w-]+\.md)(?:#([\w-]+))?", source.read_text()):
            file = REPOSITORY / path
            assert file.exists(), f"{source.name}: {path}"
            assert not anchor or anchor in headings(file), f"{source.name}: {path}#{anchor}"
