"""The plugin's own metrics, which appear at /metrics beside vLLM's.

They are written by the process of the worker. `METRICS` is the one list of them; docs/metrics.md has a row for each.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_neuron.engine.graphs import GraphSpec

PREFIX = "vllm_neuron:"


class Metric(NamedTuple):
    """One metric.

    Attributes:
        name: without the prefix; a counter's series ends in _total.
        kind: Prometheus' type.
        labels: besides model_name and rank_id.
        meaning: one line; it is also the text at /metrics.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str


BUCKET = ("bucket_name",)

METRICS = (
    Metric("num_batched_tokens_padding", "histogram", BUCKET, "Rows of a prefill step that held no token"),
    Metric("num_seqs_padding", "histogram", BUCKET, "Rows of a decode step that held no request"),
    Metric("neff_execution_count", "counter", BUCKET, "Steps run by each compiled graph; warm-up is not counted"),
    Metric("async_steps", "counter", (), "Decode steps submitted before the tokens they compute were known"),
    Metric("sync_fallback_steps", "counter", (), "Steps that waited for tokens, for the batch had changed"),
    Metric("compiles_after_warmup", "counter", (), "Compilations that a step asked for; more than 0 is a fault"),
    Metric("compilation_time_seconds", "gauge", BUCKET, "Time until a graph was compiled, or loaded, and had run once"),
    Metric("model_load_time_seconds", "gauge", (), "Time to read the weights and to place them"),
    Metric("model_load_size_bytes", "gauge", (), "Size of the weights as they are served"),
    Metric("startup_time_seconds", "gauge", (), "From the start of the server's process until everything was warm"),
)


class EngineMetrics:
    """The metrics of one worker. Counters and histograms exist from the beginning, at 0; gauges once they are set,
    which is before a server answers.

    Args:
        graphs: every graph of the configuration.
        model_name: as requests name the model.
        rank: of the worker.
        counts_steps: false of workers whose steps another one counts already: those of a tensor-parallel group all run
            the same ones.
    """

    def __init__(self, graphs: Sequence[GraphSpec], model_name: str, rank: int, counts_steps: bool = True) -> None:
        labels = {"model_name": model_name, "rank_id": str(rank)}
        # vLLM removes whatever has its name from the default registry; the files are read whichever registry it is.
        registry = CollectorRegistry()
        names = [graph.name for graph in graphs]

        def texts(name: str) -> tuple[str, str, tuple[str, ...]]:
            metric = next(metric for metric in METRICS if metric.name == name)
            return PREFIX + metric.name, metric.meaning, (*labels, *metric.labels)

        def gauge(name: str) -> Gauge:
            return Gauge(*texts(name), registry=registry, multiprocess_mode="mostrecent")

        def counter(name: str) -> Counter:
            return Counter(*texts(name), registry=registry)

        def histogram(name: str, kind: str) -> dict[str, Histogram]:
            of_kind = [graph for graph in graphs if graph.kind == kind]
            bounds = padding_bounds(max((graph.tokens for graph in of_kind), default=1))
            metric = Histogram(*texts(name), registry=registry, buckets=bounds)
            return {graph.name: metric.labels(**labels, bucket_name=graph.name) for graph in of_kind}

        compile_seconds = gauge("compilation_time_seconds")
        self._compile_seconds = {name: compile_seconds.labels(**labels, bucket_name=name) for name in names}
        self._load_seconds, self._load_bytes, self._startup_seconds = (
            gauge(name).labels(**labels)
            for name in ("model_load_time_seconds", "model_load_size_bytes", "startup_time_seconds")
        )
        if not counts_steps:
            graphs, names = (), []
        executions = counter("neff_execution_count")
        self._executions = {name: executions.labels(**labels, bucket_name=name) for name in names}
        self._padding = {
            **histogram("num_batched_tokens_padding", "prefill"),
            **histogram("num_seqs_padding", "decode"),
        }
        followed = ("async_steps", "sync_fallback_steps", "compiles_after_warmup") if counts_steps else ()
        self._followed = {name: counter(name).labels(**labels) for name in followed}
        self._seen = dict.fromkeys(followed, 0)

    def step(self, graph: GraphSpec, live_rows: int) -> None:
        """A step was handed to a graph, with so many rows that are not padding."""
        if graph.name not in self._executions:
            return
        self._executions[graph.name].inc()
        if graph.name in self._padding:
            self._padding[graph.name].observe(graph.tokens - live_rows)

    def follow(self, counts: Mapping[str, int]) -> None:
        """Raise the counters of these names to what the engine has counted itself."""
        for name, count in counts.items():
            if name in self._followed and count != self._seen[name]:
                self._followed[name].inc(count - self._seen[name])
                self._seen[name] = count

    def loaded(self, seconds: float, num_bytes: int) -> None:
        """The weights are in place."""
        self._load_seconds.set(seconds)
        self._load_bytes.set(num_bytes)

    def warmed_up(self, compile_seconds: Mapping[str, float], startup_seconds: float) -> None:
        """Everything is warm. Seconds by graph name, and since the server began."""
        for name, seconds in compile_seconds.items():
            self._compile_seconds[name].set(seconds)
        self._startup_seconds.set(startup_seconds)


def padding_bounds(rows: int) -> tuple[float, ...]:
    """Upper bounds of a padding histogram of graphs of up to ``rows`` rows: 0, then powers of two."""
    return (0.0, *(float(1 << power) for power in range((rows - 1).bit_length() + 1)))
