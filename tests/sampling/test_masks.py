"""Masks have the form of vLLM's grammar back ends."""

import numpy as np
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_neuron.kernels.mask_logits_torch import mask_logits
from vllm_neuron.sampling import mask_of, mask_words


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_masks_are_those_of_the_grammar_back_ends(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 100))
    allowed = data.draw(st.sets(st.integers(0, vocab - 1)))
    mask = torch.from_numpy(mask_of(allowed, vocab))[None]
    assert mask.shape == (1, mask_words(vocab)) and mask.dtype is torch.int32
    logits = torch.arange(vocab, dtype=torch.float32)[None]
    # xgrammar writes one element past the end of a row whose tokens are all allowed.
    wanted = torch.empty(1, vocab + 1)[:, :vocab].copy_(logits)
    xgrammar.apply_token_bitmask_inplace(wanted, mask)
    assert torch.equal(mask_logits(logits, mask), wanted)
    assert set(np.flatnonzero(np.isfinite(wanted[0].numpy()))) == allowed
