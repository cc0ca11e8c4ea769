"""What is supported on which route, and the tests that show it: the table of docs/support-matrix.md.

A row that works names its tests, which must exist; its routes are those that the files of these tests run. A row that
does not work yet says how to ask for it, and the validator must still refuse that. "Device" is the same code on Neuron
devices, which nobody has run.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.documentation.configuration import outcome
from tests.documentation.tables import table

REPOSITORY = Path(__file__).parents[2]
ROUTES = {
    "native": re.compile(r"\bBACKENDS\b|\bROUTES\b|\"neuron_native\"|\bNativeRoute\b|\bnative_compile_only\b"),
    "XLA": re.compile(r"\bBACKENDS\b|\bROUTES\b|\"vllm_neuron\"|\bXlaRoute\b|\bneuronx_cc\b"),
}
"""What stands in a test file, or in the fixtures beside it, that runs a route."""


@dataclass(frozen=True)
class Works:
    """A feature that works in CPU mode.

    Attributes:
        feature: its name.
        how: what the tests compare or count.
        tests: files, or file::function.
        state: in CPU mode.
        device: on Neuron devices.
        of_a_route: it has to do with compile routes at all.
    """

    feature: str
    how: str
    tests: tuple[str, ...]
    state: str = "works"
    device: str = "not run yet"
    of_a_route: bool = True


@dataclass(frozen=True)
class NotYet:
    """A feature that is refused: its name, and `additional_config` and settings that ask for it."""

    feature: str
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


TOKENS = "tests/serving/test_real_token_equality.py"

WORKS = (
    Works("Llama 2 and 3.x, Qwen2, Qwen3 (dense)", "greedy tokens equal transformers' in float32", (TOKENS,)),
    Works(
        "sliding windows: Mistral, and Qwen2 and Qwen3 with use_sliding_window",
        "greedy tokens past the window equal transformers'; a window's blocks hold a prompt of full length",
        ("tests/serving/test_real_sliding_window.py",),
    ),
    Works(
        "bfloat16",
        "perplexity of SmolLM2 within half a percent of transformers'",
        ("tests/serving/test_real_smollm2.py::test_real_perplexity_within_half_a_percent_of_transformers",),
    ),
    Works(
        "models of other packages",
        "greedy tokens of the worked example equal transformers'",
        ("tests/serving/test_real_helium.py", "tests/models/test_external.py", "tests/plugin/test_external_models.py"),
    ),
    Works(
        "continuous batching, preemption",
        "equal tokens as requests join, leave and are preempted",
        (f"{TOKENS}::test_real_requests_join_and_leave", f"{TOKENS}::test_real_preempted_requests_resume"),
    ),
    Works("prompts split over steps", "equal tokens", (f"{TOKENS}::test_real_prompt_split_over_steps",)),
    Works(
        "prefix caching",
        "equal tokens and counted hits for every remainder around a block edge",
        (f"{TOKENS}::test_real_prefix_hit_of_every_remainder", "tests/serving/test_real_prefix_caching.py"),
    ),
    Works(
        "segmented prefill",
        "equal tokens, with hits",
        ("tests/serving/test_real_prefix_caching.py::test_real_segmented_prefill_with_hits",),
    ),
    Works(
        "token, batch and decode-context buckets",
        "equal tokens at the edges; nothing compiles after warm-up",
        (f"{TOKENS}::test_real_prompts_at_bucket_edges", "tests/serving/test_real_buckets.py"),
    ),
    Works(
        "prompt embeddings",
        "equal tokens alone and in mixed batches; refusals",
        ("tests/serving/test_real_prompt_embeds.py", "tests/server/test_server_prompt_embeds.py"),
    ),
    Works(
        "sampling on the host",
        "formulas and chi-square tests of every parameter",
        ("tests/serving/test_real_sampling.py", "tests/plugin/test_sampling.py"),
    ),
    Works(
        "on-device sampling",
        "vLLM's kept sets, chi-square tests, equal tokens on both routes",
        ("tests/sampling/test_on_device.py", "tests/engine/test_sampled_steps.py"),
    ),
    Works("async scheduling", "no token changes", ("tests/serving/test_real_async.py",)),
    Works(
        "structured outputs, tool calls",
        "answers obey; grammars that are none or fail harm nobody",
        (
            "tests/serving/test_real_sampling.py::test_real_structured_outputs_obey",
            "tests/server/test_server_sampling.py::test_server_forty_constrained_requests_among_plain_ones",
        ),
    ),
    Works(
        "OpenAI server: streams, cancellation, signals, /health",
        "real `vllm serve`",
        ("tests/server/test_server_parameters.py", "tests/server/test_server_lifecycle.py"),
    ),
    Works(
        "compile cache: local, artifacts, remote",
        "damaged, foreign, concurrent and killed writers; what changes a key",
        ("tests/engine/test_cache.py", "tests/engine/test_cache_tiers.py", "tests/engine/test_key_table.py"),
    ),
    Works(
        "`vllm-neuron compile`, workers and timeouts",
        "servers that find everything; failing and hanging compilers",
        ("tests/cli/test_compile.py", "tests/engine/test_precompile.py", "tests/server/test_server_precompiled.py"),
    ),
    Works(
        "CPU compile mode",
        "HLO modules parsed; a stand-in for neuronx-cc, never the real one",
        ("tests/routes/test_neuronx_cc.py",),
        state="up to the compiler",
    ),
    Works(
        "CPU compile mode",
        "a stand-in for torch-neuronx, never the real one",
        ("tests/routes/test_native_compile_only.py",),
        state="up to the compiler",
    ),
    Works(
        "NKI kernels in graphs: attention, norms, rope, KV write, top_k, argmax",
        "against their torch twins; a tiny model's tokens with NKI_SIMULATOR=1",
        ("tests/kernels", "tests/routes/test_kernels.py", "tests/serving/test_real_nki_simulator.py"),
        state="in the simulator",
    ),
    Works(
        "FP8 KV cache",
        "logits of SmolLM2 against bf16; equal bytes on both routes",
        ("tests/routes/test_fp8_cache.py", "tests/models/test_real_fp8_smollm2.py"),
    ),
    Works(
        "KV budget, advice on HBM failures",
        "hand-calculated tables for both policies; injected failures",
        ("tests/engine/test_budget.py", "tests/engine/test_hbm.py"),
        of_a_route=False,
    ),
    Works(
        "metrics, Grafana dashboard",
        "a server of three processes, by hand-counted requests; each query against its scrape",
        ("tests/server/test_server_metrics.py", "tests/plugin/test_metrics.py"),
    ),
    Works(
        "`vllm-neuron compare`, `validate`, `advise`",
        "planted errors are found and placed; lists against every list there is; stand-in servers",
        ("tests/accuracy", "tests/comparison", "tests/advisor", "tests/cli/test_real_validate.py"),
        of_a_route=False,
    ),
    Works(
        "`vllm-neuron migrate`",
        "a test per old name; published launches judged by hand; a server of a migrated launch",
        ("tests/migration/test_rules.py", "tests/migration/test_launches.py", "tests/server/test_server_migrated.py"),
        device="needs none",
        of_a_route=False,
    ),
    Works(
        "`vllm-neuron rollout`",
        "stand-in servers that are healthy, wrong, slow and dead; the proxy itself",
        ("tests/rollout",),
        device="needs none",
        of_a_route=False,
    ),
)

NOT_YET = (
    NotYet("weight quantization", {"neuron_config": {"quantized": True, "quantization_dtype": "int8"}}),
    NotYet("MXFP weights", {"neuron_config": {"quantization": "mxfp4"}}),
    NotYet("speculative decoding (EAGLE3)", settings={"speculative_method": "eagle3"}),
    NotYet("tensor parallelism, and sequence parallelism with it", settings={"tensor_parallel_size": 2}),
    NotYet("pipeline parallelism", settings={"pipeline_parallel_size": 2}),
    NotYet("data parallelism", settings={"data_parallel_size": 2}),
    NotYet("expert parallelism", settings={"enable_expert_parallel": True}),
    NotYet("disaggregated inference", settings={"kv_connector": "NixlConnector"}),
    NotYet("multimodal models", settings={"is_multimodal": True}),
    NotYet("encoder-disaggregated inference", settings={"mm_encoder_only": True}),
    NotYet("LoRA adapters", settings={"enable_lora": True}),
    NotYet("pooling models", settings={"is_pooling": True}),
)


def support_table() -> str:
    """A row for every feature."""
    return table(("Feature", "Route", "CPU mode", "Neuron devices", "Verified how", "Tests"), _rows())


def _rows() -> Iterator[tuple[str, ...]]:
    for row in WORKS:
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        yield row.feature, routes(row), row.state, row.device, row.how, tests
    for later in NOT_YET:
        text = outcome(later.config, **later.settings)
        assert text.startswith("not yet: "), f"{later.feature} works: move it, and name its tests"
        yield later.feature, "-", "not yet", "not yet", f"refused: {text.removeprefix('not yet: ')}", ""


def routes(row: Works) -> str:
    """The routes that the tests of a row run: their files say so, or the fixtures of their folders."""
    if not row.of_a_route:
        return "-"
    files = {REPOSITORY / test.partition("::")[0] for test in row.tests}
    texts = [path.read_text() for file in files for path in (file, file.parent / "conftest.py") if path.is_file()]
    found = [route for route, says in ROUTES.items() if any(says.search(text) for text in texts)]
    assert found, f"{row.feature}: its tests run no route"
    return "both" if len(found) == len(ROUTES) else found[0]


def missing_tests() -> list[str]:
    """Tests that are named here and are not there."""
    return [f"{row.feature}: no {test}" for row in WORKS for test in row.tests if not _exists(test)]


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    return (REPOSITORY / path).exists() and (not name or name in _functions(REPOSITORY / path))


@cache
def _functions(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
