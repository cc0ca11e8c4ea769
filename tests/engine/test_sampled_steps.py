"""Graphs that sample, on the real routes: tokens of one step feed the next, masks act, nothing of a row spills over."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.fixtures import NUM_BLOCKS, config, random_weights, tiny_model
from tests.engine.test_executor import BLOCKS, PROMPT, dense_logits, row
from vllm_neuron.compilation.cache import CacheFolders, CompileCache
from vllm_neuron.config import OnDeviceSamplingConfig
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.graphs import GraphSpec, list_graphs
from vllm_neuron.engine.inputs import Row, RowSampling
from vllm_neuron.engine.sampled_inputs import FedTokens, SampledInputBuilder
from vllm_neuron.routes.route import CPU
from vllm_neuron.routes.select import select_route
from vllm_neuron.sampling import GreedyInputs, SampledWithLogprobs, SamplingInputs, mask_of

MODEL = tiny_model(num_hidden_layers=1)
VOCAB = MODEL.vocab_size
OTHER = [2, 8, 20, 21, 22]


@pytest.fixture(
    scope="module",
    params=[
        (backend, twins, greedy)
        for backend, twins in (("neuron_native", False), ("neuron_native", True), ("vllm_neuron", True))
        for greedy in (False, True)
    ],
    ids=lambda p: f"{p[0]}-{'twins' if p[1] else 'kernels'}-{'argmax' if p[2] else 'sampler'}",
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GraphExecutor:
    backend, twins, greedy = request.param
    resolved = config(
        backend=backend,
        disable_nki_kernels=twins,
        num_batched_tokens_buckets=(32,),
        num_seqs_buckets=(1, 4),
        decode_context_length_buckets=(256,),
        on_device_sampling=OnDeviceSamplingConfig(all_greedy=greedy),
    )
    route = select_route(backend, CPU)
    cache = CompileCache(CacheFolders(local=tmp_path_factory.mktemp("cache")), route.name)
    executor = GraphExecutor(MODEL, resolved, route, cache, random_weights(MODEL), torch.float32)
    executor.allocate_kv_cache(NUM_BLOCKS)
    executor.warm_up(lambda ready: None)
    return executor


def greedy(prompt: list[int], count: int, allowed: list[int] | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = dense_logits(MODEL, tokens)[-1]
        tokens.append(int(logits.argmax()) if allowed is None else max(allowed, key=lambda i: float(logits[i])))
    return tokens[len(prompt) :]


def test_tokens_feed_the_next_step_without_the_host(made: GraphExecutor) -> None:
    """Also from a prefill to a decode, from a small graph to a large one, and for rows that change places."""
    first, second = PROMPT[:20], PROMPT[5:17]
    before = made.submit_prefill(row(second, 0, OTHER))
    found: dict[str, list[int]] = {"first": [], "second": before.collect().token_ids.tolist()}
    before = made.submit_decode([row([0], 12, OTHER)._replace(fed_from=0)], before)
    found["second"] += before.collect().token_ids.tolist()
    known = found["second"][-1]
    before = made.submit_prefill(row(first, 0))
    found["first"] += before.collect().token_ids.tolist()
    places = {"second": 1, "first": 0}
    for step in range(6):
        rows: dict[str, Row] = {}
        for name in sorted(places, reverse=bool(step % 2)):
            start, blocks = (20 + step, BLOCKS) if name == "first" else (13 + step, OTHER)
            # After the prefill of the first, the second's token is known to the host only.
            rows[name] = row([known if (name, step) == ("second", 0) else 0], start, blocks)
            if (name, step) != ("second", 0):
                rows[name] = rows[name]._replace(fed_from=places[name])
        before = made.submit_decode(list(rows.values()), before)
        places = {name: index for index, name in enumerate(rows)}
        for name, token in zip(rows, before.collect().token_ids.tolist(), strict=True):
            found[name].append(token)
    assert found == {"first": greedy(first, 7), "second": greedy(second, 8)}
    assert len(set(found["first"] + found["second"])) > 5
    assert made.statistics.compiles_after_warmup == 0


def test_masks_act_on_their_rows_and_are_gone_in_the_next_step(made: GraphExecutor) -> None:
    allowed = [3, 40, 95]
    masked = RowSampling(mask=mask_of(allowed, VOCAB))
    got = made.submit_prefill(row(PROMPT[:9], 0)._replace(sampling=masked)).collect().token_ids.tolist()
    assert got == greedy(PROMPT[:9], 1, allowed)
    made.submit_prefill(row(PROMPT[:8], 0, OTHER))
    pair = [row([PROMPT[9]], 9), row([PROMPT[8]], 8, OTHER)]
    free = made.submit_decode(pair).collect().token_ids.tolist()
    assert free == greedy(PROMPT[:10], 1) + greedy(PROMPT[:9], 1)
    for index in (0, 1):
        rows = [r._replace(sampling=masked) if i == index else r for i, r in enumerate(pair)]
        got = made.submit_decode(rows).collect().token_ids.tolist()
        assert got[1 - index] == free[1 - index]
        assert got[index] == greedy(PROMPT[: 10 - index], 1, allowed)[0]
    assert made.submit_decode(pair).collect().token_ids.tolist() == free


def test_a_rows_token_and_logprobs_do_not_depend_on_its_batch(made: GraphExecutor) -> None:
    made.submit_prefill(row(PROMPT[:9], 0))
    made.submit_prefill(row(PROMPT[:8], 0, OTHER))
    sampling = RowSampling(temperature=1.3, top_k=7, top_p=0.9, uniform=0.77)
    pair = [row([PROMPT[9]], 9)._replace(sampling=sampling), row([PROMPT[8]], 8, OTHER)]
    together = [tensor.clone() for tensor in made.submit_decode(pair).collect()]
    (tokens,) = made.submit_decode(pair, logprobs=False).collect()
    assert torch.equal(tokens, together[0])
    alone = made.submit_decode(pair[:1]).collect()
    for part, whole in zip(alone, together, strict=True):
        torch.testing.assert_close(part[0], whole[0], rtol=1e-5, atol=1e-5)
    if isinstance(alone, SampledWithLogprobs):
        logprobs = dense_logits(MODEL, PROMPT[:10])[-1].log_softmax(-1)
        torch.testing.assert_close(alone.logprobs[0], logprobs[alone.logprob_ids[0].long()], rtol=1e-4, atol=1e-4)


def test_graphs_that_sample_have_names_of_their_own_and_none_for_prompt_logits() -> None:
    named = {
        greedy: [g.name for g in list_graphs(config(on_device_sampling=OnDeviceSamplingConfig(all_greedy=greedy)))]
        for greedy in (False, True)
    }
    host = [g.name for g in list_graphs(config()) if g.kind != "prompt_logits"]
    assert named == {False: [f"{name}_sampled" for name in host], True: [f"{name}_greedy" for name in host]}


def builder(sampling: str = "device") -> SampledInputBuilder:
    assert sampling in ("device", "greedy")
    return SampledInputBuilder(GraphSpec("decode", 4, 4, 256, sampling, 6), 16, (None,), 70)  # type: ignore[arg-type]


def test_inputs_of_padding_rows_are_harmless_whatever_was_there_before() -> None:
    filled = builder()
    hot = RowSampling(2.0, 5, 0.5, 0.9, mask_of([1], 70))
    filled.build([row([1], 3)._replace(sampling=hot)] * 4)
    inputs = filled.build([row([1], 3)])
    sampling = inputs.sampling
    assert isinstance(sampling, SamplingInputs)
    assert sampling.temperature.tolist() == [0.0] * 4
    assert sampling.mask.shape == (4, 3) and (sampling.mask == -1).all()
    assert isinstance(inputs.fed, FedTokens) and inputs.fed.rows.tolist() == [-1] * 4


def test_rows_are_not_fed_from_a_step_that_is_not_given(made: GraphExecutor) -> None:
    with pytest.raises(ValueError, match="A row takes its token from an earlier step, and none is given"):
        made.submit_decode([row([1], 3), row([1], 3)._replace(fed_from=0)])


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="takes token 6 of no earlier step"):
        builder().build([row([1], 3)._replace(fed_from=6)])
    wide = RowSampling(mask=np.full(4, -1, np.int32))
    with pytest.raises(ValueError, match=r"a mask of shape \(4,\), rows have \(3,\)"):
        builder("greedy").build([row([1], 3)._replace(sampling=wide)])


def test_argmax_only_graphs_take_masks_and_nothing_else() -> None:
    assert isinstance(builder("greedy").build(()).sampling, GreedyInputs)


def test_prompt_logits_are_refused_where_there_is_no_graph(made: GraphExecutor) -> None:
    with pytest.raises(RuntimeError, match="no graph of prompt logits"):
        made.prompt_logits(torch.zeros(3, 32))


def test_cache_keys_tell_the_ways_of_sampling_apart(tmp_path: Path) -> None:
    route = select_route("neuron_native", CPU)
    cache = CompileCache(CacheFolders(local=tmp_path), route.name)
    digests = set()
    for sampling, seqs in ((None, 4), (False, 4), (True, 4), (False, 8)):
        on_device = None if sampling is None else OnDeviceSamplingConfig(all_greedy=sampling)
        resolved = config(on_device_sampling=on_device, max_num_seqs=seqs)
        executor = GraphExecutor(MODEL, resolved, route, cache, random_weights(MODEL), torch.float32)
        executor.allocate_kv_cache(NUM_BLOCKS)
        compiler = executor._graph_compiler
        graph = next(g for g in executor.graphs if g.kind == "decode" and g.requests == 1)
        digests |= {compiler.key(compiler.lower(graph)).digest, compiler.fingerprint(graph)}
    assert len(digests) == 8
