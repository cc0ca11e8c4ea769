"""Random numbers: known from seed, request and position alone."""

from scipy.stats import kstest, pearsonr

from vllm_neuron.sampling import Uniforms


def test_a_number_depends_on_seed_request_and_position_only() -> None:
    forward = [Uniforms(3, 5)[i] for i in range(200)]
    same = Uniforms(3, 5)
    backward = [same[i] for i in reversed(range(200))]
    assert forward == backward[::-1]
    assert len(set(forward)) == 200
    for other in (Uniforms(4, 5), Uniforms(3, 6), Uniforms(5, 3)):
        assert not set(forward) & {other[i] for i in range(200)}


def test_seeds_and_numbers_of_any_size() -> None:
    names = range(2**64 - 3, 2**64)
    numbers = [Uniforms(seed, name)[10**6] for seed in (0, -1, 2**70 + 1) for name in (0, 2**63 - 1, *names)]
    assert len(set(numbers)) == 15
    assert all(0 <= number < 1 for number in numbers)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    by_position = [Uniforms(0, 0)[i] for i in range(5000)]
    by_request = [Uniforms(0, i)[0] for i in range(5000)]
    for numbers in (by_position, by_request):
        assert kstest(numbers, "uniform").pvalue > 0.001
        assert abs(pearsonr(numbers[1:], numbers[:-1]).statistic) < 0.06
