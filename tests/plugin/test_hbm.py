"""Advice where device memory runs out, on the texts that the configuration reference lists."""

import pytest

from vllm_neuron.plugin.hbm import advice

TEXTS = (
    "[NCC_EOOM002] Estimated peak HBM usage is above the limit",
    "Maximum peak HBM usage: 25.1 GB",
    "nrt_load_util: NEFF could not be loaded, NRT_RESOURCE",
    "nrt_tensor_allocate status=4 message=no memory",
    "Allocation Failure while loading a model",
)


@pytest.mark.parametrize("text", TEXTS)
def test_each_text_is_known(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEURON_RESERVED_HEADROOM_GIB", raising=False)
    found = advice(RuntimeError(text))
    assert found and "lower VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION, which is 0.3." in found


def test_an_explicit_reserve_goes_up_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_RESERVED_HEADROOM_GIB", "4")
    found = advice(RuntimeError(TEXTS[0]))
    assert found and "set VLLM_NEURON_RESERVED_HEADROOM_GIB to 5, which is 4 now" in found


def test_the_cause_of_an_error_counts() -> None:
    try:
        try:
            raise RuntimeError(TEXTS[1])
        except RuntimeError as cause:
            raise ValueError("compiling failed") from cause
    except ValueError as error:
        assert advice(error)


@pytest.mark.parametrize("text", ["", "NRT_RESOURCE", "out of memory", "nrt_tensor_allocate status=1"])
def test_other_errors_get_none(text: str) -> None:
    assert advice(RuntimeError(text)) is None
