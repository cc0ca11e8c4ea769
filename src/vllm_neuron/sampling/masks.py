"""Masks of allowed tokens: one bit for each, 32 in a word, the lowest first."""

from collections.abc import Collection

import numpy as np

from vllm_neuron.kernels.mask_logits_torch import WORD

ALLOW_ALL = -1
"""A word that allows each of its tokens."""


def mask_words(vocab_size: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocab_size // WORD)


def mask_of(token_ids: Collection[int], vocab_size: int) -> np.ndarray:
    """Mask [ceil(V / 32)] int32 that allows these tokens and no others."""
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    words = np.zeros(mask_words(vocab_size), np.uint32)
    np.bitwise_or.at(words, ids // WORD, np.uint32(1) << (ids % WORD).astype(np.uint32))
    return words.view(np.int32)
