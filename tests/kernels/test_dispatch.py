"""What is chosen for each op, from route, device, variables and arguments, and what is said about it."""

import logging
from typing import Any

import pytest
import torch

from vllm_neuron.kernels import opaque
from vllm_neuron.kernels.dispatch import (
    COVERED,
    ONLY_WIDE_CACHES,
    OPS,
    UNCALLED,
    KernelSet,
    choices,
    fp8_cache_warning,
    implementation,
    select,
    using,
)
from vllm_neuron.kernels.kv_fp8_torch import FP8, KVScales
from vllm_neuron.kernels.nki_ops import NkiOps, NkiOptions

NATIVE, XLA = "neuron_native", "vllm_neuron"
SIMULATED = {"rms_norm", "add_rms_norm", "rope", "kv_write", "paged_attention", "top_k", "argmax"}


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_SIMULATOR", "1")


def selection(backend: str = NATIVE, cpu_mode: bool = True, **changes: Any) -> Any:
    values: dict[str, Any] = {"disabled": False, "simulated": False, "torch_mask": False, "cores": 2}
    return select(backend, cpu_mode, **{**values, "nki_installed": False, **changes})


@pytest.mark.parametrize(
    ("changes", "sets"),
    [
        ({}, (KernelSet.CPU,)),
        ({"backend": XLA}, (KernelSet.CPU,)),
        ({"simulated": True}, (KernelSet.NKI, KernelSet.CPU)),
        ({"simulated": True, "backend": XLA}, (KernelSet.NKI, KernelSet.CPU)),
        ({"simulated": True, "disabled": True}, ()),
        ({"cpu_mode": False}, ()),
        ({"cpu_mode": False, "nki_installed": True}, (KernelSet.NKI,)),
        ({"cpu_mode": False, "nki_installed": True, "disabled": True}, ()),
        ({"cpu_mode": False, "nki_installed": True, "backend": XLA}, ()),
    ],
    ids=str,
)
def test_sets_follow_route_device_and_variables(changes: dict[str, Any], sets: tuple[KernelSet, ...]) -> None:
    assert selection(**changes).sets == sets


def test_options_follow_route_device_and_variables() -> None:
    assert selection().options == NkiOptions(on_device=False, in_place=True, torch_mask=False, cores=1)
    device = selection(XLA, cpu_mode=False, torch_mask=True).options
    assert device == NkiOptions(on_device=True, in_place=False, torch_mask=True, cores=2)


def why(op: str, **changes: Any) -> tuple[str, str]:
    (choice,) = (choice for choice in choices(selection(**changes)) if choice.op == op)
    return choice.implementation, choice.why


def test_the_reason_of_each_choice_is_told() -> None:
    assert [choice.op for choice in choices(selection())] == [*OPS, *UNCALLED]
    assert why("gated_mlp", simulated=True) == ("in no graph", UNCALLED["gated_mlp"])
    assert why("kv_write", simulated=True)[1].endswith("for an FP8 KV cache: C++ kernel")
    assert "FP8" not in why("kv_write")[1]
    assert why("rms_norm", simulated=True) == ("NKI kernel", "NKI_SIMULATOR=1: in the simulator")
    assert why("linear", simulated=True) == ("C++ kernel", "there is no NKI kernel; CPU mode")
    assert why("rms_norm", backend=XLA) == ("C++ kernel", "NKI kernel: NKI_SIMULATOR=0; CPU mode")
    name, text = why("kv_write", backend=XLA)
    assert (name, text.split("; ")[1]) == ("torch twin", "there is no C++ kernel that does not write in place")
    assert "VLLM_NEURON_DISABLE_NKI_KERNELS=1" in why("rms_norm", disabled=True)[1]
    assert "nki package" in why("rope", cpu_mode=False)[1]
    assert "ATTN_MASK_TORCH=1: torch" in why("paged_attention", simulated=True, torch_mask=True)[1]
    assert "neuronx-cc yet" in why("rope", cpu_mode=False, backend=XLA, nki_installed=True)[1]


def test_every_kernel_of_a_graph_is_named() -> None:
    assert COVERED[KernelSet.NKI] == SIMULATED
    with using(KernelSet.NKI):
        assert {op for op in OPS if implementation(op).__module__.endswith("nki_ops")} == SIMULATED


def test_what_a_kernel_does_not_take_goes_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    half, single = torch.ones(2, 8).half(), torch.ones(2, 8)
    with caplog.at_level(logging.DEBUG, "vllm_neuron.kernels.dispatch"), using(KernelSet.NKI):
        for _ in range(2):
            expected = implementation("rms_norm")(half, half[0], 1e-5)
        torch.testing.assert_close(expected, half)
        torch.testing.assert_close(implementation("rms_norm")(single, single[0], 1e-5), single, atol=1e-4, rtol=0)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "rms_norm: torch twin (NKI kernel: x must be float32 or bfloat16, not float16)"),
        ("DEBUG", "rms_norm: NKI kernel (takes these arguments)"),
    ]


def test_kernels_that_no_graph_calls_are_those_of_no_op() -> None:
    assert not UNCALLED.keys() & set(OPS)
    for name in UNCALLED:
        assert not hasattr(NkiOps, name), f"{name} is called"


def test_who_wants_nki_kernels_is_told_that_an_fp8_cache_has_none(caplog: pytest.LogCaptureFixture) -> None:
    """At start, whether or not a graph is traced, and for each op of a graph that is."""
    warning = fp8_cache_warning(selection(simulated=True))
    assert warning is not None and "kv_write (C++ kernel) and paged_attention (C++ kernel)" in warning
    assert "kv_write (torch twin) and paged" in (fp8_cache_warning(selection(XLA, simulated=True)) or "")
    assert "attention (torch twin)" in (fp8_cache_warning(selection(cpu_mode=False, nki_installed=True)) or "")
    assert fp8_cache_warning(selection()) is None
    cache, rows, one = torch.zeros(2, 128, 1, 8).to(FP8), torch.ones(2, 1, 8), torch.ones(2)
    scales, table, last = KVScales(one, one, one[:1]), torch.ones(2, 1).int(), torch.zeros(2).int()
    with caplog.at_level(logging.WARNING, "vllm_neuron.kernels.dispatch"), using(KernelSet.NKI):
        implementation("kv_write")(cache, cache, rows, rows, last + 128, scales)
        implementation("paged_attention")(rows, cache, cache, table, last, 0.5, scales=scales)
    assert [record.message.split(":")[0] for record in caplog.records] == sorted(ONLY_WIDE_CACHES)


def test_sinks_are_not_for_the_cpp_kernel() -> None:
    generator = torch.Generator().manual_seed(0)
    q, cache = torch.randn(1, 2, 4, generator=generator), torch.randn(2, 2, 128, 1, 4, generator=generator)
    arguments = q, *cache, torch.zeros(1, 1).int(), torch.tensor([100]).int(), 0.5, None, torch.tensor([1.0, 2.0])
    with using():
        expected = implementation("paged_attention")(*arguments)
    for sets in ((KernelSet.CPU,), (KernelSet.NKI,)):
        with using(*sets):
            torch.testing.assert_close(implementation("paged_attention")(*arguments), expected)


@pytest.mark.parametrize("torch_mask", [False, True])
def test_decode_attention_takes_the_mask_of_torch_if_asked_to(torch_mask: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode(), using(KernelSet.NKI, options=NkiOptions(torch_mask=torch_mask)):
        cache = torch.empty(4, 128, 1, 8)
        arguments = torch.empty(2, 4, 8), cache, cache, torch.empty(2, 1).int(), torch.empty(2).int()
        graph = make_fx(lambda *tensors: implementation("paged_attention")(*tensors, 0.5))(*arguments).graph
    (call,) = (node for node in graph.nodes if opaque.NAMESPACE in str(node.target))
    assert "paged_decode_attention" in str(call.target)
    assert (call.args[8] is not None) is torch_mask


def test_sources_of_a_text_are_those_of_its_kernels() -> None:
    package = "vllm_neuron.kernels"
    found = opaque.sources("torch.ops.vllm_neuron_nki.top_k.default and vllm_neuron_nki.rope")
    assert found == tuple(f"{package}.{name}" for name in ("opaque", "rope", "tiling", "top_k"))
    assert f"{package}.paged_rows" in opaque.sources("vllm_neuron_nki.paged_decode_attention")
    assert opaque.sources("torch.ops.aten.mm.default") == ()
