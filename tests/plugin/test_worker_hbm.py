"""A worker whose weights, cache or graphs do not fit into device memory says what to do (KVM-3)."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.fixtures import config, tiny_model
from vllm_neuron.engine.hbm import HBMAllocationError
from vllm_neuron.plugin import worker as module
from vllm_neuron.plugin.worker import NeuronWorker

CAUSE = "nrt_load_util: NRT_RESOURCE"


def fail(*arguments: Any) -> None:
    raise RuntimeError(CAUSE)


def a_worker(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> NeuronWorker:
    """A worker without vLLM's parts: only what stands between its methods and the executor."""
    worker = object.__new__(NeuronWorker)
    worker.config, worker.model, worker.route = config(**settings), tiny_model(), SimpleNamespace()
    worker.vllm_config = worker.model_config = SimpleNamespace(seed=0)
    worker._executor = SimpleNamespace(allocate_kv_cache=fail, warm_up=fail)
    for name in ("open_cache", "load_model_weights", "model_dtype", "require_groups"):
        monkeypatch.setattr(module, name, lambda *arguments: None)
    monkeypatch.setattr(module, "GraphExecutor", lambda *arguments, **options: fail())
    monkeypatch.setattr(NeuronWorker, "_new_metrics", lambda self: SimpleNamespace(step=None))
    return worker


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "export VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION=0.25"),
        ({"kv_headroom_gib": 4.0}, "export VLLM_NEURON_RESERVED_HEADROOM_GIB=5"),
    ],
)
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("load_model", ()),
        ("initialize_from_config", (SimpleNamespace(num_blocks=3),)),
        ("compile_or_warm_up_model", ()),
    ],
)
def test_every_stage_of_a_start_explains(
    method: str, arguments: Any, settings: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = a_worker(monkeypatch, **settings)
    with pytest.raises(HBMAllocationError) as caught:
        getattr(worker, method)(*arguments)
    assert str(caught.value).startswith(f"{CAUSE}\n") and advice in str(caught.value)
