"""The one list of all graphs of a configuration, and the choice of the graph for a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vllm_neuron.config.resolved import ResolvedConfig
from vllm_neuron.kv_cache.blocks import round_up_to_blocks

GraphKind = Literal["prefill", "decode", "prompt_logits", "layers"]
GraphSampling = Literal["host", "device", "greedy"]


class NoBucketError(ValueError):
    """No graph is large enough for a step. Schedulers keep steps within the buckets, so this guards against a bug."""


@dataclass(frozen=True)
class GraphSpec:
    """What a graph is specialised to.

    Attributes:
        kind: "prefill" (one request, many rows), "decode" (many requests, one row each), "prompt_logits" (hidden
            states in, logits out, for prompt logprobs) or "layers" (a prefill that returns what each layer leaves, for
            validation; never part of serving).
        tokens: T, rows of the step.
        requests: B, requests of the step.
        context: S, tokens that a request's block table spans; 0 for "prompt_logits".
        sampling: "host" (the graph returns logits), "device" (it returns tokens) or "greedy" (it returns the most
            likely tokens, and has no inputs for anything else).
        hands_on: P, how many token ids a graph that samples returns, and may be given to take tokens from: the same
            for all graphs, so that any can follow any. 0 where the host samples.
        embeddings: whether rows may be embeddings instead of token ids; true of "prefill" only.
    """

    kind: GraphKind
    tokens: int
    requests: int
    context: int
    sampling: GraphSampling = "host"
    hands_on: int = 0
    embeddings: bool = False

    @property
    def name(self) -> str:
        """Name in logs, metrics and cache manifests, e.g. "decode_b8_ctx4096" or "decode_b8_ctx4096_greedy"."""
        suffix = {"host": "", "device": "_sampled", "greedy": "_greedy"}[self.sampling]
        match self.kind:
            case "prefill":
                takes = "_embeds" if self.embeddings else ""
                return f"prefill_t{self.tokens}_ctx{self.context}{takes}{suffix}"
            case "decode":
                return f"decode_b{self.requests}_ctx{self.context}{suffix}"
            case "prompt_logits":
                return f"prompt_logits_t{self.tokens}"
            case "layers":
                return f"layers_t{self.tokens}_ctx{self.context}"


def list_graphs(config: ResolvedConfig) -> tuple[GraphSpec, ...]:
    """Every graph that serving this configuration can need, each once, largest (rows x context) first.

    Largest first, because whatever does not fit into memory should fail in the first seconds of a warm-up.
    """
    longest = round_up_to_blocks(config.max_model_len, config.block_size)
    contexts = {round_up_to_blocks(c, config.block_size) for c in config.decode_context_length_buckets} | {longest}
    graphs = {
        GraphSpec("prefill", tokens, 1, longest, embeddings=config.enable_prompt_embeds)
        for tokens in config.num_batched_tokens_buckets
    }
    graphs |= {GraphSpec("decode", b, b, context) for b in config.num_seqs_buckets for context in contexts}
    on_device = config.on_device_sampling
    if on_device is None:
        # Prompt logprobs are made on the host, from logits that only sampling on the host needs.
        graphs.add(GraphSpec("prompt_logits", min(config.num_batched_tokens_buckets), 1, 0))
    else:
        sampling: GraphSampling = "greedy" if on_device.all_greedy else "device"
        graphs = {replace(graph, sampling=sampling, hands_on=config.max_num_seqs) for graph in graphs}
    return tuple(sorted(graphs, key=lambda g: (-g.tokens * g.context, -g.tokens, g.kind)))


def prefill_graph(graphs: Iterable[GraphSpec], tokens: int) -> GraphSpec:
    """The smallest prefill graph of at least ``tokens`` rows.

    Raises:
        NoBucketError: no prefill graph has that many rows.
    """
    candidates = [g for g in graphs if g.kind == "prefill"]
    return _smallest(
        [g for g in candidates if g.tokens >= tokens],
        f"a prefill step of {tokens} tokens, and the largest value of num_batched_tokens_buckets is "
        f"{max((g.tokens for g in candidates), default=0)}",
    )


def decode_graph(graphs: Iterable[GraphSpec], requests: int, context: int) -> GraphSpec:
    """The smallest decode graph for ``requests`` requests of which the longest has ``context`` tokens.

    ``context`` counts the token that the step itself adds: it is the largest position of the step plus one.

    Raises:
        NoBucketError: no decode graph takes that many requests or that long a context.
    """
    candidates = [g for g in graphs if g.kind == "decode"]
    return _smallest(
        [g for g in candidates if g.requests >= requests and g.context >= context],
        f"a decode step of {requests} requests with a context of {context} tokens, the largest value of "
        f"num_seqs_buckets is {max((g.requests for g in candidates), default=0)}, and the longest context "
        f"(max_model_len, in whole blocks) is {max((g.context for g in candidates), default=0)}",
    )


def prompt_logits_graph(graphs: Iterable[GraphSpec]) -> GraphSpec | None:
    """The graph that turns hidden states into logits; there is none where sampling is on the device."""
    return next((g for g in graphs if g.kind == "prompt_logits"), None)


def graphs_for_validation(
    config: ResolvedConfig, chunks: Iterable[int], batches: Iterable[int], with_layers: bool = True
) -> tuple[GraphSpec, ...]:
    """Those graphs of a configuration that a forced continuation runs, as they are served.

    Where the configuration samples in the graphs, these return logits instead.

    Args:
        config: the resolved configuration.
        chunks: numbers of tokens of the prefill steps.
        batches: numbers of continuations that are decoded together.
        with_layers: a "layers" graph for each prefill graph, too.

    Raises:
        NoBucketError: a chunk or a batch is larger than any bucket.
    """
    served = list_graphs(replace(config, on_device_sampling=None, async_scheduling=False))
    prefills = {prefill_graph(served, tokens) for tokens in chunks}
    sizes = {decode_graph(served, requests, 1).requests for requests in batches}
    decodes = {g for g in served if g.kind == "decode" and g.requests in sizes}
    layers = {replace(graph, kind="layers", embeddings=False) for graph in prefills if with_layers}
    logits = {g for g in served if g.kind == "prompt_logits"}
    return tuple(sorted(prefills | decodes | layers | logits, key=lambda g: (g.kind, -g.tokens, -g.context)))


def layers_graph(graphs: Iterable[GraphSpec], tokens: int) -> GraphSpec:
    """The smallest "layers" graph of at least ``tokens`` rows.

    Raises:
        NoBucketError: none has that many rows, or there is none.
    """
    fitting = [g for g in graphs if g.kind == "layers" and g.tokens >= tokens]
    return _smallest(fitting, f"a validating step of {tokens} tokens")


def _smallest(fitting: Sequence[GraphSpec], need: str) -> GraphSpec:
    if not fitting:
        raise NoBucketError(
            f"Request exceeds largest bucket: {need}. Steps are kept within the buckets before they get here, so this "
            "is a fault of the engine, not of the request. See docs/troubleshooting.md#request-exceeds-largest-bucket."
        )
    return min(fitting, key=lambda g: (g.tokens, g.context))
