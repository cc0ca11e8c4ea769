"""top_k and argmax against their torch twins: exactly, ties included."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.kernels import top_k_torch
from vllm_neuron.kernels.top_k import argmax, top_k

from .compare import cores, dtypes, few, identical, normal, tokens

vocabularies = st.sampled_from([512, 1000, 1024, 4008, 16032])


@few
@given(tokens(140), vocabularies, st.sampled_from([1, 8, 20, 50]), st.booleans(), dtypes, cores)
def test_top_k_is_its_twin(rows, vocabulary, k, ties, dtype, lnc):
    logits = normal(rows, vocabulary, dtype=dtype, scale=3.0)
    logits = logits.round() if ties else logits
    identical(top_k(logits, k, lnc=lnc), top_k_torch.top_k(logits, k))


@few
@given(tokens(140), vocabularies, st.booleans(), dtypes, cores)
def test_argmax_is_its_twin(rows, vocabulary, ties, dtype, lnc):
    logits = normal(rows, vocabulary, dtype=dtype, scale=3.0)
    logits = logits.round() if ties else logits
    identical([argmax(logits, lnc=lnc)], [top_k_torch.argmax(logits)])


def test_one_piece_may_hold_all_of_the_largest():
    logits = torch.zeros(1, 2048)
    logits[0, 700:764] = torch.arange(64.0, 0.0, -1.0)
    identical(top_k(logits, 64), top_k_torch.top_k(logits, 64))


def test_equal_logits_give_the_lowest_indices():
    assert top_k(torch.zeros(3, 1024), 20)[1].tolist() == [list(range(20))] * 3


def test_vocabulary_of_which_most_is_masked():
    logits = torch.full((2, 1024), -torch.inf)
    logits[:, 1000], logits[:, 3] = 2.0, 1.0
    values, indices = top_k(logits, 4)
    assert values.tolist() == [[2.0, 1.0, -torch.inf, -torch.inf]] * 2
    assert indices[:, :2].tolist() == [[1000, 3]] * 2
