"""The kernel of the decode mask against its twin."""

import nki
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_neuron.kernels import decode_mask_torch
from vllm_neuron.kernels.decode_mask import decode_mask, decode_mask_kernel

POSITIONS = torch.tensor([0, 5, 127], dtype=torch.int32)


@given(
    positions=st.lists(st.integers(0, 5000), min_size=1, max_size=300),
    context=st.integers(1, 5000),
    window=st.none() | st.integers(1, 6000),
    lnc=st.sampled_from([1, 2]),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_equals_the_twin(positions, context, window, lnc):
    rows = torch.tensor(positions, dtype=torch.int32)
    expected = decode_mask_torch.decode_mask(rows, context, window)
    torch.testing.assert_close(decode_mask(rows, context, window, lnc), expected, rtol=0, atol=0)


def test_twin_by_hand():
    expected = [[1, 0, 0, 0], [0, 0, 1, 1]]
    assert decode_mask_torch.decode_mask(torch.tensor([0, 3]), 4, 2).tolist() == expected


def test_strict_mode_has_nothing_to_note():
    assert not nki.simulate(decode_mask_kernel[2]).run(POSITIONS, 128, 7).notes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": POSITIONS.long()}, "positions must be int32, not int64"),
        ({"positions": POSITIONS[None]}, "positions must have shape [T], not (1, 3)"),
        ({"context": 0}, "context must be 1 to 16777216, not 0"),
        ({"window": 0}, "window must be 1 or more, or None, not 0"),
        ({"lnc": 4}, "lnc must be 1 or 2, not 4"),
    ],
)
def test_refuses(changed, message):
    with pytest.raises(ValueError) as raised:
        decode_mask(**({"positions": POSITIONS, "context": 128} | changed))
    assert str(raised.value) == message
