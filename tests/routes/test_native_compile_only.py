"""CPU compile mode of the native route, with a stand-in for torch-neuronx that notes what it is asked to compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import Target

STAND_IN = """
import os
from torch._dynamo import register_backend
from torch.library import custom_op

SETTINGS = os.environ.get("TORCH_NEURONX_COMPILE_ONLY"), os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
COMPILED = []
OPERATORS = []


def nki_op(name, mutates_args):
    OPERATORS.append(name.removeprefix("vllm_neuron_nki::"))
    return custom_op(name, mutates_args=mutates_args)


@register_backend(name="neuron")
def neuron(graph, example_inputs):
    COMPILED.append([tuple(tensor.shape) for tensor in example_inputs])
    return graph.forward
"""

COMPILE = """
from tests.routes.native_steps import MODEL, cache, inputs, to_meta, weights
from vllm_neuron.routes import native
from vllm_neuron.routes.native import NativeRoute
from vllm_neuron.routes.route import Target

# Torch knows no device `neuron` here; its device without memory takes the place.
native._DEVICE = "meta"
route = NativeRoute(Target("trn2", compile_only=True))
print(route.probe().works, route.probe().reason)
arguments = to_meta(weights()), cache(9, device="meta"), to_meta(inputs(2, 1))
lowered = route.trace("decode_b2", MODEL.step, *arguments).lower()
print(lowered.text().count("torch.device('meta')"), lowered.text().count("torch.device("))
executable = lowered.compile()
import torch_neuronx
print(*torch_neuronx.SETTINGS)
(shapes,) = torch_neuronx.COMPILED
print(shapes.count((9, 16, 1, 8)), (2,) in shapes)
loaded = route.load(executable.save())
for one in (executable, loaded):
    try:
        one(None, None, None)
    except RuntimeError as error:
        print(error)
"""

KERNELS = """
from tests.routes.native_steps import MODEL, cache, inputs, to_meta, weights
from vllm_neuron.kernels import simulator
from vllm_neuron.kernels.dispatch import KernelSet, using
from vllm_neuron.kernels.nki_ops import NkiOptions
from vllm_neuron.routes import native
from vllm_neuron.routes.route import Target

simulator.install()  # stands in for the nki package, whose kernels are only looked at
native._DEVICE = "meta"
route = native.NativeRoute(Target("trn2", compile_only=True))
route.probe()
arguments = to_meta(weights()), cache(9, device="meta"), to_meta(inputs(2, 1))
with using(KernelSet.NKI, options=NkiOptions(on_device=True, cores=2)):
    lowered = route.trace("decode_b2", MODEL.step, *arguments).lower()
lowered.compile()
import torch_neuronx
print(*sorted(torch_neuronx.OPERATORS))
print(lowered.text().count("= vllm_neuron_nki_"), lowered.text().count(", 2)\\n"), len(torch_neuronx.COMPILED))
"""


def run(program: str, folder: Path, **variables: str) -> list[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(folder), str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_step_is_compiled_by_one_call_on_tensors_without_contents(tmp_path: Path) -> None:
    (tmp_path / "torch_neuronx.py").write_text(STAND_IN)
    probe, devices, settings, shapes, *errors = run(COMPILE, tmp_path, NEURON_PLATFORM_TARGET_OVERRIDE="GEN3")
    assert probe == "True torch-neuronx compiles for trn2; nothing runs here"
    assert devices == "1 1", "what the graph makes is on the device too"
    assert settings == "1 trn2", "as they were when it was imported"
    assert shapes == "4 True", "keys and values of two layers, and two rows"
    assert len(errors) == 2
    assert all("decode_b2 is compiled for trn2, and this machine only compiles" in error for error in errors)


def test_kernels_are_operators_of_torch_neuronx(tmp_path: Path) -> None:
    (tmp_path / "torch_neuronx.py").write_text(STAND_IN)
    operators, counts = run(KERNELS, tmp_path)
    assert {"rms_norm", "rope", "kv_write", "paged_decode_attention", "top_k"} <= set(operators.split())
    assert counts == "11 11 1", "eleven calls, all of them on two cores, in one compiled graph"


def test_without_torch_neuronx_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NEURONX_COMPILE_ONLY", raising=False)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    probe = NativeRoute(Target("trn2", compile_only=True)).probe()
    assert not probe.works
    for part in ("torch-neuronx", "extra `neuron`", "VLLM_NEURON_BACKEND=vllm_neuron"):
        assert part in probe.reason


def test_nothing_is_placed_or_allocated() -> None:
    route = NativeRoute(Target("trn2", compile_only=True))
    for call in (
        lambda: route.place_weights({"w": torch.ones(1)}),
        lambda: route.allocate_kv_cache([(1, 1)], torch.float32),
    ):
        with pytest.raises(RuntimeError, match="There is no device here: VLLM_NEURON_CPU_COMPILE=1"):
            call()
