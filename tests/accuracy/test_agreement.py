"""Statistics of logits and scores, against values worked out by hand or by scipy."""

import math

import pytest
import torch
from scipy.special import rel_entr, softmax

from vllm_neuron.accuracy.agreement import kl_of_top, logit_errors, score_agreement
from vllm_neuron.accuracy.three_way import first_excess, row_errors


def test_logit_errors_of_a_known_difference() -> None:
    truth = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    ours = truth + torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
    found = logit_errors(ours, truth, 2)
    assert found.max == 2.0
    assert found.rms == pytest.approx(math.sqrt(4 / 8))
    assert (found.top1, found.topk) == (0.5, 1.0)
    expected = rel_entr(softmax(truth[1].double().numpy()), softmax(ours[1].double().numpy())).sum()
    assert found.kl_max == pytest.approx(expected)
    assert found.kl_mean == pytest.approx(expected / 2)


def test_equal_logits_have_no_error() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    found = logit_errors(logits, logits, 5)
    assert (found.max, found.kl_max, found.top1, found.topk) == (0, 0, 1, 1)


def test_divergence_of_the_likeliest_tokens_is_below_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, ours = (torch.randn(100, generator=generator).double() for _ in range(2))
    log_p, log_q = truth.log_softmax(0), ours.log_softmax(0)
    whole = float((log_p.exp() * (log_p - log_q)).sum())
    top = truth.topk(10).indices.tolist()
    bound = kl_of_top({t: float(log_p[t]) for t in top}, {t: float(log_q[t]) for t in top})
    assert 0 < bound <= whole
    everything = kl_of_top(dict(enumerate(log_p.tolist())), dict(enumerate(log_q.tolist())))
    assert everything == pytest.approx(whole, rel=1e-6)


def test_scores_are_compared_position_by_position() -> None:
    truth = [{1: -0.1, 2: -3.0}, {1: -0.5, 2: -1.0}]
    ours = [{1: -0.1, 2: -3.0}, {2: -0.6, 3: -0.9}]
    found = score_agreement(truth, ours)
    assert (found.top1, found.topk, found.first_difference, found.worst) == (0.5, 0.75, 1, 1)
    assert found.max_difference == pytest.approx(0.4)


@pytest.mark.parametrize("ours", [[], [{1: -0.1}], [{7: -0.1}, {1: -0.1}]])
def test_scores_that_cannot_be_compared_are_refused(ours: list[dict[int, float]]) -> None:
    with pytest.raises(ValueError):
        score_agreement([{1: -0.1}, {1: -0.1}], ours)


def test_rows_are_measured_relative_to_their_own_size() -> None:
    truth = torch.tensor([[3.0, 4.0], [300.0, 400.0], [0.0, 0.0]])
    ours = torch.tensor([[3.0, 4.5], [300.0, 450.0], [0.0, 0.0]])
    assert row_errors(ours, truth).tolist() == pytest.approx([0.1, 0.1, 0.0])


def test_one_bad_row_is_found_and_small_noise_of_a_row_is_no_excess() -> None:
    noise = torch.full((100,), 1e-3)
    noise[3] = 1e-6
    ours = torch.full((100,), 1.1e-3)
    assert first_excess(["layer 0"], [ours], [noise], 2.0, torch.bfloat16) is None
    ours[40] = 5e-1
    found = first_excess(["embedding", "layer 0"], [noise, ours], [noise, noise], 2.0, torch.bfloat16)
    assert found is not None and (found.stage, found.row, found.rows) == ("layer 0", 40, 1)


def test_a_small_error_of_most_rows_is_found() -> None:
    noise = torch.full((100,), 1e-2)
    found = first_excess(["layer 0"], [noise * 2.1], [noise], 2.0, torch.bfloat16)
    assert found is not None and (found.row, found.rows) == (0, 100)
