"""Public NKI kernels run in the simulator unmodified and agree with their own golden functions.

Sources come from NKI_CONFORMANCE_SOURCES, where {owner} and {name} stand for a repository: a folder of git
repositories, or a URL; GitHub when it is unset. They are read into a temporary folder. Without them it is skipped.
"""

import io
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import pytest

SOURCES = os.environ.get("NKI_CONFORMANCE_SOURCES") or "https://github.com/{owner}/{name}"
REPOSITORIES = {
    "library": ("aws-neuron", "nki-library", "."),
    "sdk": ("aws-neuron", "aws-neuron-sdk", "nki/examples"),
    "samples": ("aws-neuron", "nki-samples", "src/nki_samples/tutorials"),
}
HERE = Path(__file__).parent
OURS = HERE / "public_kernels.py"
_LIBRARY = "test/integration/nkilib"

TARGETS: dict[str, tuple[str, ...]] = {
    "SDK first examples": ("sdk_simulate", "sdk_tensor_addition", "sdk_getting_started", "sdk_index_cases"),
    "matrix_multiplication": ("test_matrix_multiplication",),
    "transpose2d, average_pool2d, fused_mamba": ("test_transpose2d", "test_average_pool2d", "test_fused_mamba"),
    "cumsum": ("core/cumsum/test_cumsum.py::TestCumsumKernel::test_cumsum_fast",),
    "rope_hf": ("core/embeddings/test_rope_hf.py::TestRopeHFKernel::test_rope_hf_lnc",),
    "tp_broadcast, cross_partition_copy": (
        "core/utils/test_tp_broadcast.py",
        "core/utils/test_cross_partition_copy.py",
    ),
    "conv1d": (
        "experimental/conv/test_depthwise_conv1d.py::TestDepthwiseConv1d::test_depthwise_conv1d_fast",
        "experimental/conv/test_conv1d.py::TestConv1DKernel::test_conv1d_basic",
    ),
    "cross_entropy": ("test_cross_entropy",),
    "find_nonzero, dynamic_elementwise_add": (
        "experimental/benchmark/test_find_nonzero_indices_with_count.py",
        "experimental/dynamic_shapes/test_dynamic_elementwise_add.py",
    ),
    "gen_mask_tkg, cascaded_max": (
        "core/attention/test_gen_mask_tkg.py::TestGenMaskTkgHbm::test_flat_kv",
        "core/attention/test_gen_mask_tkg.py::TestGenMaskTkgHbm::test_block_kv",
        "core/max/test_cascaded_max.py::TestCascadedMaxKernel::test_cascaded_max_unit",
    ),
}
"""The first targets, each with the tests that stand for it."""
FURTHER: dict[str, tuple[str, ...]] = {
    "attention_cte": ("test_attention_cte",),
    "rotational_topk": ("core/topk/test_topk.py::TestTopKKernel::test_topk_unit",),
    "rope": ("core/embeddings/test_rope.py::TestRopeKernel::test_rope_fast",),
    "rmsnorm_quant": ("core/rmsnorm/test_rmsnorm_quant.py::TestRmsNormQuantKernel::test_rmsnorm_quant_lnc_unit",),
}
AT_LEAST = 8
CASES_PER_TEST = "2"
"""Cases that run of each test of the library, for time."""


def fetch(folder: Path, owner: str, name: str, part: str) -> bool:
    """Read a repository's newest version into a folder; whether it could be had."""
    place = SOURCES.format(owner=owner, name=name)
    if Path(place).is_dir():
        archive = subprocess.run(["git", "-C", place, "archive", "HEAD", part], capture_output=True)
        if archive.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(folder, filter="data")
        return archive.returncode == 0
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    clone = ["git", "clone", "-q", "--depth", "1", "--filter=blob:none", "--sparse", place, str(folder)]
    steps = [
        clone,
        ["git", "-C", str(folder), "sparse-checkout", "set", "--no-cone", f"/{part}/" if part != "." else "/*"],
    ]
    return all(subprocess.run(step, capture_output=True, env=quiet, timeout=300).returncode == 0 for step in steps)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for key, (owner, name, part) in REPOSITORIES.items():
        folder = tmp_path_factory.mktemp(key)
        if not fetch(folder, owner, name, part):
            pytest.skip(f"{owner}/{name} is not available from {SOURCES}")
        folders[key] = folder
    return folders


def results(sources: dict[str, Path], tmp_path: Path) -> list[tuple[str, bool]]:
    """Run all tests in one process: (file and name, passed) of each case."""
    library = [f"{_LIBRARY}/{t}" for tests in (*TARGETS.values(), *FURTHER.values()) for t in tests if "/" in t]
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "tests.kernels.simulator.library_plugin", "-c", os.devnull, "-q"]
    command += ["--noconftest", "-p", "no:cacheprovider", "--assert=plain", "-W", "ignore", f"--junitxml={report}"]
    command += [f"--rootdir={sources['library']}", f"--cases-per-test={CASES_PER_TEST}", str(OURS), *library]
    path = os.pathsep.join(p for p in (str(HERE.parents[2]), os.environ.get("PYTHONPATH")) if p)
    places = {"CONFORMANCE_SDK": str(sources["sdk"]), "CONFORMANCE_SAMPLES": str(sources["samples"])}
    done = subprocess.run(
        command, cwd=sources["library"], capture_output=True, text=True, env=os.environ | places | {"PYTHONPATH": path}
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    print(done.stdout[-3000:])
    return [
        (f"{case.get('classname')}.{case.get('name')}", not len(case)) for case in xml.parse(report).iter("testcase")
    ]


def test_public_kernels_agree_with_their_golden_functions(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = results(sources, tmp_path)

    def agrees(tests: tuple[str, ...]) -> bool:
        words = [test.removesuffix(".py").replace(".py::", ".").replace("::", ".").replace("/", ".") for test in tests]
        found = [[passed for name, passed in cases if word in name] for word in words]
        return all(passed and all(passed) for passed in found)

    first = {target: agrees(tests) for target, tests in TARGETS.items()}
    further = {target: agrees(tests) for target, tests in FURTHER.items()}
    counts = Counter(passed for _, passed in cases)
    with capsys.disabled():
        print(f"\npublic kernels: {sum(first.values())} of {len(first)} targets agree; of the larger ones", end=" ")
        print(", ".join(target for target, ok in further.items() if ok) or "none", end=" ")
        print(f"({counts[True]} of {counts.total()} cases)")
        print(*(f"  differs: {target}" for target, ok in (first | further).items() if not ok), sep="\n", end="")
    assert sum(first.values()) >= AT_LEAST
    assert any(further.values())
