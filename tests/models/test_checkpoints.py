"""The tiny checkpoints are good test material."""

import pytest
from transformers import AutoTokenizer

from tests.checkpoints import BOS, EOS, KINDS, VOCAB_SIZE, checkpoint, greedy_oracle, logits_oracle, prompt


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_greedy_decoding_does_not_repeat_itself(kind: str) -> None:
    for seed, length in ((0, 1), (1, 20)):
        assert len(set(greedy_oracle(checkpoint(kind), prompt(length, seed), 32))) >= 8


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_greedy_tokens_are_no_near_ties(kind: str) -> None:
    """Float32 noise of about 1e-5 must not decide a token, whether or not the oracle keeps its keys and values."""
    token_ids = prompt(20, seed=1)
    greedy = greedy_oracle(checkpoint(kind), token_ids, 32)
    rows = logits_oracle(checkpoint(kind), token_ids + greedy)[19:]
    assert rows[:-1].argmax(-1).tolist() == greedy
    best = rows.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3


def test_every_token_id_decodes_to_text_and_text_comes_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    assert len(tokenizer) == VOCAB_SIZE
    assert all(tokenizer.decode([token]) for token in range(VOCAB_SIZE))
    assert tokenizer.decode(tokenizer.encode("Bonjour, ça va? 你好")) == "Bonjour, ça va? 你好"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_the_chat_template_renders() -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.\n<|user|>Hello\n<|assistant|>"
