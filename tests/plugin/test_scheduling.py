"""Scheduler and model runner together, under random arrivals, aborts and too few blocks, in both protocols."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from tests.plugin.simulation import BLOCK_SIZE, Simulation, Windows, answer, make_config, prompts
from vllm_neuron.config.blocks import request_blocks
from vllm_neuron.kv_cache.layout import KVLayerSpec, group_windows, with_groups
from vllm_neuron.plugin.scheduler import MAX_CONSECUTIVE_PREFILLS, is_prefill

PROTOCOLS = ["0", "1"]
FEW_BLOCKS = 1 + 64 // BLOCK_SIZE
"""The null block and one request of full length: whenever two requests are long, one has to go."""


@pytest.fixture(params=PROTOCOLS, ids=["v1", "v2"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
    return request.param


def test_tokens_of_a_full_batch_equal_those_alone(protocol: str) -> None:
    simulation = Simulation(make_config(), 64)
    wanted = {}
    for index, prompt in enumerate(prompts([1, 7, 8, 9, 15, 16, 17, 33, 40])):
        simulation.add(str(index), prompt, 12)
        wanted[str(index)] = answer(prompt, 12)
    simulation.run()
    assert simulation.tokens == wanted
    assert simulation.trace.first_tokens == list(wanted)
    assert ("decode", 4) in simulation.executor.steps


def test_a_resumed_request_goes_on_where_it_was(protocol: str) -> None:
    simulation = Simulation(make_config(enable_prefix_caching=False), FEW_BLOCKS)
    first, second = prompts([20, 20])
    simulation.add("first", first, 40)
    simulation.add("second", second, 40)
    simulation.run()
    assert simulation.trace.preemptions > 0
    assert simulation.tokens == {"first": answer(first, 40), "second": answer(second, 40)}


def test_seeded_requests_do_not_depend_on_preemption(protocol: str) -> None:
    def tokens(num_blocks: int) -> dict[str, list[int]]:
        simulation = Simulation(make_config(), num_blocks)
        for index, prompt in enumerate(prompts([20, 20, 20])):
            simulation.add(str(index), prompt, 30, temperature=1.0, seed=index)
        simulation.run()
        assert bool(simulation.trace.preemptions) == (num_blocks == FEW_BLOCKS)
        return simulation.tokens

    assert tokens(FEW_BLOCKS) == tokens(64)


@pytest.mark.parametrize("remainder", range(1, BLOCK_SIZE + 2))
def test_a_cached_prefix_of_any_length(remainder: int) -> None:
    simulation = Simulation(make_config(), 64)
    (prompt,) = prompts([3 * BLOCK_SIZE + remainder])
    simulation.add("first", prompt[: 3 * BLOCK_SIZE], 2)
    simulation.run()
    simulation.add("second", prompt, 5)
    output, _ = simulation.step()
    assert output.num_scheduled_tokens == {"second": remainder}
    simulation.run()
    assert simulation.tokens["second"] == answer(prompt, 5)


def test_prefix_cache_lookups_of_a_request_that_must_wait_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run out: the second request is looked up at every step until it can start."""
    simulation = Simulation(make_config(), FEW_BLOCKS)
    manager = simulation.scheduler.kv_cache_manager
    counted = []
    take = manager.make_prefix_cache_stats
    monkeypatch.setattr(manager, "make_prefix_cache_stats", lambda: counted.append(take()) or counted[-1])
    first, second = prompts([50, 40])
    simulation.add("first", first, 10)
    simulation.step()
    simulation.add("second", second, 2)
    simulation.run()
    assert simulation.trace.preemptions == 0
    assert simulation.trace.decoding.count(1) >= 9, "the second request did not wait"
    lookups = [(stats.requests, stats.queries, stats.hits) for stats in counted if stats]
    assert [sum(column) for column in zip(*lookups, strict=True)] == [2, 90, 0]


def test_decodes_do_not_wait_for_more_than_a_few_prefills() -> None:
    simulation = Simulation(make_config(max_num_seqs=16), 512)
    (prompt,) = prompts([4])
    simulation.add("running", prompt, 40)
    simulation.step()
    for index, long in enumerate(prompts([60] * 8)):
        simulation.add(str(index), long, 2)
    simulation.run()
    assert simulation.longest_prefill_run() == MAX_CONSECUTIVE_PREFILLS
    assert simulation.tokens["running"] == answer(prompt, 40)


def test_blocks_before_the_window_are_given_back() -> None:
    """One request of 64 tokens runs in the blocks of its window and of one chunk; beside it is room for a second."""
    simulation = Simulation(make_config(max_num_batched_tokens=8), 1 + 2 * 4, windows=(10,))
    (first, second) = prompts([40, 40])
    simulation.add("first", first, 24)
    simulation.add("second", second, 24)
    pool, most = simulation.scheduler.kv_cache_manager.block_pool, 0
    while simulation.scheduler.has_requests():
        simulation.step()
        most = max(most, 8 - pool.get_num_free_blocks())
    assert simulation.trace.preemptions == 0 and most <= 8
    assert simulation.tokens == {"first": answer(first, 24, (10,)), "second": answer(second, 24, (10,))}


def test_arrivals_are_served_in_order_beyond_the_largest_batch() -> None:
    simulation = Simulation(make_config(max_num_seqs=2), 64)
    lengths = [5, 30, 3, 17, 1, 40]
    for index, prompt in enumerate(prompts(lengths)):
        simulation.add(str(index), prompt, 6)
    simulation.run()
    assert simulation.trace.first_tokens == [str(index) for index in range(len(lengths))]


def test_a_request_can_be_aborted_in_every_state() -> None:
    simulation = Simulation(make_config(), 64)
    names = ["decoding", "between chunks", "waiting"]
    for name, prompt in zip(names, prompts([4, 50, 4]), strict=True):
        simulation.add(name, prompt, 10)
    simulation.step()
    simulation.step()
    states = {name: simulation.scheduler.requests[name] for name in names}
    assert not is_prefill(states["decoding"]) and is_prefill(states["between chunks"])
    assert states["waiting"] in list(simulation.scheduler.waiting)
    for name in names:
        simulation.abort(name)
    simulation.run()
    assert len(simulation.tokens["decoding"]) == 1 and not simulation.tokens["waiting"]


def test_an_aborted_id_can_be_used_again(protocol: str) -> None:
    simulation = Simulation(make_config(), 64)
    first, second = prompts([6, 9])
    simulation.add("name", first, 20)
    simulation.step()
    simulation.step()
    simulation.abort("name")
    simulation.add("name", second, 8)
    simulation.run()
    assert simulation.tokens["name"] == answer(second, 8)


arrivals = st.lists(
    st.fixed_dictionaries(
        {
            "length": st.integers(1, 50),
            "max_tokens": st.integers(1, 13),
            "prefix": st.integers(0, 1),
            "arrives": st.integers(0, 40),
            "aborted": st.one_of(st.none(), st.integers(0, 80)),
        }
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, num_blocks=st.integers(FEW_BLOCKS, 3 * FEW_BLOCKS), max_num_seqs=st.integers(1, 5))
@pytest.mark.parametrize("v2", PROTOCOLS, ids=["v1", "v2"])
def test_random_loads(v2: str, arrivals: list[dict[str, Any]], num_blocks: int, max_num_seqs: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
        simulation = Simulation(make_config(max_num_seqs=max_num_seqs), num_blocks)
    run_load(simulation, arrivals, (None,))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(arrivals=arrivals, more_blocks=st.integers(0, 2 * FEW_BLOCKS), window=st.sampled_from([1, 7, 8, 9, 20, 64]))
@pytest.mark.parametrize("v2", PROTOCOLS, ids=["v1", "v2"])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["all layers", "some layers"])
def test_random_loads_of_models_with_a_sliding_window(
    v2: str, is_mixed: bool, arrivals: list[dict[str, Any]], more_blocks: int, window: int
) -> None:
    """Blocks before a window go to other requests and other groups; the prefix cache knows only what is left."""
    layers = (window, None, window) if is_mixed else (window,)
    windows = group_windows(with_groups(KVLayerSpec(1, 8, layer) for layer in layers))
    config = make_config()
    whole = request_blocks(windows, 64, config.scheduler_config.max_num_batched_tokens, BLOCK_SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
        simulation = Simulation(config, 1 + whole + more_blocks, windows)
    run_load(simulation, arrivals, windows)


def run_load(simulation: Simulation, arrivals: list[dict[str, Any]], windows: Windows) -> None:
    """Requests that come and go; those that end have the tokens of the oracle."""
    shared = list(prompts([50, 50], seed=1))
    wanted, order = {}, []
    events = sorted(enumerate(arrivals), key=lambda item: item[1]["arrives"])
    for step in range(81):
        while events and events[0][1]["arrives"] <= step:
            index, arrival = events.pop(0)
            # Two families of prompts that share prefixes, so that the prefix cache has hits of all lengths.
            prompt = [*shared[arrival["prefix"]][: arrival["length"] - 1], 3 + index]
            simulation.add(str(index), prompt, arrival["max_tokens"])
            wanted[str(index)] = answer(prompt, arrival["max_tokens"], windows)
            order.append(str(index))
        for index, arrival in enumerate(arrivals):
            if arrival["aborted"] == step:
                simulation.abort(str(index))
        if simulation.scheduler.has_requests():
            simulation.step()
    simulation.run()
    for name, tokens in simulation.tokens.items():
        if arrivals[int(name)]["aborted"] is None:
            assert tokens == wanted[name]
        else:
            assert tokens == wanted[name][: len(tokens)]
    assert simulation.trace.first_tokens == [name for name in order if name in simulation.trace.first_tokens]
    assert simulation.longest_prefill_run() <= MAX_CONSECUTIVE_PREFILLS


def step_output(counts: dict[str, int], **spec: list[int]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.num_scheduled_tokens = counts
    output.total_num_scheduled_tokens = sum(counts.values())
    output.scheduled_spec_decode_tokens = spec
    return output


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (step_output({"a": 1, "b": 2}), "1 prefills among 2 requests"),
        (step_output({"a": 2, "b": 2}), "2 prefills among 2 requests"),
        (step_output({"a": 1}, a=[7]), "speculated tokens"),
    ],
)
def test_the_runner_refuses_steps_that_are_not_of_one_kind(output: SchedulerOutput, what: str) -> None:
    simulation = Simulation(make_config(), 64)
    for name, prompt in zip("ab", prompts([4, 4]), strict=True):
        simulation.add(name, prompt, 10)
    for _ in range(3):
        simulation.step()
    with pytest.raises(RuntimeError, match=what):
        simulation.runner.execute_model(output)


def test_execute_and_sample_come_in_turns() -> None:
    simulation = Simulation(make_config(), 64)
    simulation.add("a", [5, 6], 4)
    with pytest.raises(RuntimeError, match="no step"):
        simulation.runner.sample_tokens(None)
    simulation.runner.execute_model(simulation.scheduler.schedule())
    with pytest.raises(RuntimeError, match="have not been sampled"):
        simulation.runner.execute_model(step_output({"a": 1}))
