"""How speed and memory grow with the batch, the context and the model, on both routes in CPU mode, as plots.

    python benchmarks/growth.py [--part batch|context|size] [--route ROUTE] [--points 1 8 ...] [--folder DIR]
    python benchmarks/growth.py --docs docs        no measuring: plots and a table for the documentation

- batch: 1 to 64 requests of 128 tokens each;
- context: one request of 128 to 8192 tokens;
- size: one request of 128 tokens to a tiny model, SmolLM2-135M's sizes, and those of Qwen2.5-Coder-0.5B.

All models have random weights in bfloat16. Each point is vLLM's engine in a process of its own, with the graphs and the
KV cache that the point needs and no others. Decode: requests over the median of 30 steps. Prefill: the prompt until the
first token. Memory: the most that the process has had; graphs are compiled in another. Results are added to those in
DIR (build/growth), so that the work can be done piece by piece; report.html there shows what there is so far.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from in_process import engine, prompt, time_batch

from vllm_neuron.reporting import page
from vllm_neuron.reporting.svg import line_chart

REPOSITORY = Path(__file__).parents[1]
ROUTES = {"neuron_native": "native", "vllm_neuron": "XLA"}
STEPS = 30
ROOM = 48
"""Tokens that a prompt leaves below max_model_len for warm and timed steps."""
PREFILL_STEP = 1024
LLAMA = {"hidden_act": "silu", "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 8192}
MODELS = {
    "tiny": ("llama", 512, 64, 128, 2, 4, 2, {**LLAMA, "head_dim": 16}),
    "135M": ("llama", 49152, 576, 1536, 30, 9, 3, LLAMA),
    "0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, {"tie_word_embeddings": True, "max_position_embeddings": 8192}),
}
"""Family, vocabulary, hidden size, intermediate size, layers, heads, KV heads, and the rest of config.json."""
POINTS: dict[str, tuple[str, ...]] = {
    "batch": tuple(str(2**power) for power in range(7)),
    "context": tuple(str(2**power) for power in range(7, 14)),
    "size": tuple(MODELS),
}


@dataclass(frozen=True)
class Setup:
    """What a point serves.

    Attributes:
        model: one of MODELS.
        batch: requests.
        prompt: tokens of each.
        context: max_model_len.
        step: tokens of a prefill step.
    """

    model: str
    batch: int
    prompt: int
    context: int
    step: int


@dataclass(frozen=True)
class Point:
    """What one point has measured.

    Attributes:
        part: one of POINTS.
        route: value of VLLM_NEURON_BACKEND.
        name: of the point.
        x: requests, tokens, or millions of parameters.
        decode: tokens per second.
        prefill: tokens per second; None where requests decode meanwhile.
        memory: GiB.
    """

    part: str
    route: str
    name: str
    x: float
    decode: float
    prefill: float | None
    memory: float


def setup_of(part: str, name: str) -> Setup:
    """What the point of that name serves."""
    if part == "batch":
        return Setup("135M", int(name), 128, 256, 128)
    if part == "context":
        return Setup("135M", 1, int(name) - ROOM, int(name), min(int(name), PREFILL_STEP))
    return Setup(name, 1, 128, 256, 128)


def measure(part: str, route: str, name: str) -> Point:
    """One point, in this process."""
    from transformers import AutoConfig

    from vllm_neuron.models.registry import build_model

    setup = setup_of(part, name)
    family, vocabulary, hidden, mlp, layers, heads, kv_heads, rest = MODELS[setup.model]
    config = AutoConfig.for_model(
        family,
        architectures=[f"{family.capitalize()}ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **rest,
    )
    buckets = {"num_seqs_buckets": [setup.batch], "num_batched_tokens_buckets": [setup.step]}
    prompts = [prompt(row, setup.prompt) for row in range(setup.batch)]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        arguments = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": setup.context,
            "max_num_seqs": setup.batch,
            "max_num_batched_tokens": setup.step,
            "block_size": 32,
            "num_gpu_blocks_override": 1 + setup.batch * setup.context // 32,
            "enable_prefix_caching": False,
            "additional_config": {"neuron_config": buckets},
        }
        with engine(folder, **arguments) as llm:
            times = time_batch(llm, prompts, STEPS, temperature=0)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parameters = sum(math.prod(spec.shape) for spec in build_model(config).weight_table.values())
    return Point(
        part,
        route,
        name,
        round(parameters / 1e6, 1) if part == "size" else float(name),
        round(setup.batch / statistics.median(times.steps), 1),
        round(setup.prompt / times.prefill, 1) if setup.batch == 1 else None,
        round(memory, 2),
    )


def run(part: str, route: str, name: str) -> Point:
    """`measure` in a new process."""
    environment = {
        "VLLM_NEURON_CPU_MODE": "1",
        "VLLM_NEURON_BACKEND": route,
        # Elsewhere, so that the memory of compiling does not count.
        "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": "1",
    }
    command = [sys.executable, __file__, "--part", part, "--route", route, "--points", name, "--measure"]
    done = subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True)
    return Point(**json.loads(done.stdout.strip().splitlines()[-1]))


def stored(folder: Path) -> list[Point]:
    """All points that were measured so far, in the order of POINTS."""
    path = folder / "points.json"
    found = [Point(**fields) for fields in json.loads(path.read_text())] if path.exists() else []
    return sorted(found, key=lambda point: (list(POINTS).index(point.part), point.x, point.route))


def store(folder: Path, point: Point) -> None:
    """Add a point, in place of an earlier one of its name."""
    same = (point.part, point.route, point.name)
    others = [other for other in stored(folder) if (other.part, other.route, other.name) != same]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "points.json").write_text(json.dumps([asdict(one) for one in (*others, point)], indent=2) + "\n")


CHARTS = (
    ("batch", "decode", "Decode by batch", "requests", "tokens/s"),
    ("batch", "memory", "Memory by batch", "requests", "GiB"),
    ("context", "decode", "Decode by context", "tokens of context", "tokens/s"),
    ("context", "prefill", "Prefill by context", "tokens of context", "tokens/s"),
    ("context", "memory", "Memory by context", "tokens of context", "GiB"),
    ("size", "decode", "Decode by size of the model", "million parameters", "tokens/s"),
    ("size", "memory", "Memory by size of the model", "million parameters", "GiB"),
)
"""Part, field of a point, title, and labels of the axes."""
DECADES = ("size", "decode")
"""The chart whose values lie decades apart."""
FIELDS = {"decode": "decode, tokens/s", "prefill": "prefill, tokens/s", "memory": "GiB"}
COLUMNS = ("", *(f"{label}: {route}" for label in FIELDS.values() for route in ROUTES.values()))
WHAT = {"batch": "batch of {}", "context": "context of {} tokens", "size": "{} model"}


def charts(points: Sequence[Point]) -> dict[str, tuple[str, str]]:
    """(title, SVG) of each chart that has points, by the name of its file."""
    found = {}
    for part, field, title, x_label, y_label in CHARTS:
        series = {
            label: [(p.x, value) for p in points if (p.part, p.route) == (part, route) if (value := getattr(p, field))]
            for route, label in ROUTES.items()
        }
        if shown := {label: values for label, values in series.items() if values}:
            svg = line_chart(title, x_label, y_label, shown, logarithmic=(part, field) == DECADES, doubling=True)
            found[f"growth-{part}-{field}.svg"] = (title, svg)
    return found


def rows(points: Sequence[Point]) -> list[list[str]]:
    """A row of the table for each point, the routes side by side; "-" where nothing was measured."""
    found: dict[tuple[str, str], dict[str, Point]] = {}
    for point in points:
        found.setdefault((point.part, point.name), {})[point.route] = point
    return [
        [
            WHAT[part].format(name),
            *(str(getattr(of.get(route), field, None) or "-") for field in FIELDS for route in ROUTES),
        ]
        for (part, name), of in found.items()
    ]


EXPLAINED = """\
`python benchmarks/growth.py`: random weights in bfloat16, sampling on the host. The model has SmolLM2-135M's sizes,
there is one request, and its prompt has 128 tokens, unless the row says otherwise; the 0.5B model has the sizes of
Qwen2.5-Coder-0.5B. Each point is an engine of its own with the graphs and the KV cache that it needs.
"""
START, END = "<!-- growth: written by benchmarks/growth.py -->\n", "<!-- end of growth -->\n"


def write_docs(folder: Path, points: Sequence[Point]) -> None:
    """Write the charts into a folder of documentation, and its section into performance.md there, at the end if new."""
    images = []
    for name, (title, svg) in charts(points).items():
        (folder / name).write_text(svg + "\n")
        images.append(f"![{title}]({name})\n")
    lines = [f"| {' | '.join(cells)} |\n" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows(points))]
    section = f"{START}\n## Growth\n\n{EXPLAINED}\n{''.join(images)}\n{''.join(lines)}\n{END}"
    path = folder / "performance.md"
    text = path.read_text()
    before, _, rest = text.partition(START)
    path.write_text(before + section + rest.partition(END)[2] if rest else f"{text}\n{section}")


def write_report(folder: Path, points: Sequence[Point]) -> Path:
    """Write all of it as one HTML file that fetches nothing."""
    path = folder / "report.html"
    drawn = [svg for _, svg in charts(points).values()]
    path.write_text(page.page("Growth", page.table(COLUMNS, rows(points)), *drawn))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=POINTS, action="append")
    parser.add_argument("--route", choices=ROUTES, action="append")
    parser.add_argument("--points", nargs="+", help="of one part: " + "; ".join(" ".join(p) for p in POINTS.values()))
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "growth")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="folder with performance.md")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts, routes = arguments.part or list(POINTS), arguments.route or list(ROUTES)
    if arguments.points and (len(parts) > 1 or not set(arguments.points) <= set(POINTS[parts[0]])):
        parser.error(f"--points are of one --part: {', '.join(POINTS[parts[0]])} of {parts[0]}")
    if arguments.measure:
        print(json.dumps(asdict(measure(parts[0], routes[0], arguments.points[0]))))
        return
    if arguments.docs is not None:
        write_docs(arguments.docs, stored(arguments.folder))
        return
    for part in parts:
        for name in arguments.points or POINTS[part]:
            for route in routes:
                point = run(part, route, name)
                store(arguments.folder, point)
                print(json.dumps(asdict(point)), flush=True)
    print(write_report(arguments.folder, stored(arguments.folder)))


if __name__ == "__main__":
    main()
