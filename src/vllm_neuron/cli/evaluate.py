"""The commands that compare, validate and advise, as `vllm-neuron` has them."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_neuron.cli.errors import exiting_on_errors

FAILED = 3
"""Exit code of a comparison or validation that was made and did not pass; 1 is one that could not be made."""

WITH_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}
Flags = Annotated[list[str] | None, typer.Argument(metavar="FLAG", help="Flags of `vllm serve`.")]
Prompts = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="Texts to continue, one a line. Default: eight.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report with charts there as well.")]
Backend = Literal["neuron_native", "vllm_neuron"]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(name="compare", context_settings=WITH_FLAGS)(compare_routes)
    app.command(name="validate", context_settings=WITH_FLAGS)(validate)
    app.command(name="advise")(advise)


def compare_routes(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or name of the model.")],
    flags: Flags = None,
    baseline: Annotated[Backend, typer.Option(help="Route to compare with.")] = "vllm_neuron",
    candidate: Annotated[Backend, typer.Option(help="Route to judge.")] = "neuron_native",
    baseline_flags: Annotated[str, typer.Option(metavar="TEXT", help="Flags of the baseline only.")] = "",
    candidate_flags: Annotated[str, typer.Option(metavar="TEXT", help="Flags of the candidate only.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Of each side, in turn: A B A B.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Timed requests of a round.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Of them in flight at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a timed prompt; every second one has half.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of a timed answer.")] = 64,
    greedy_tokens: Annotated[int, typer.Option(min=1, help="Of each greedy answer that is compared.")] = 32,
    prompts: Prompts = None,
    cold: Annotated[bool, typer.Option(help="Start cold in each round, in an empty cache, and then warm.")] = True,
    accuracy: Annotated[bool, typer.Option(help="Compare each side's logits with transformers.")] = True,
    min_agreement: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of prompts with equal greedy tokens.")
    ] = 1.0,
    near_tie: Annotated[
        float, typer.Option(min=0, help="Logits no further apart count as equal where answers first differ.")
    ] = 0.0,
    max_slowdown: Annotated[
        float | None, typer.Option(min=0, help="How many times slower the candidate may be. Default: any.")
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option(min=0, help="How many times the baseline's memory it may take. Default: any.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to keep the servers' output in.")] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Run the same workload through both compile routes and set the results side by side.

    Takes MODEL and the flags of `vllm serve`. Each side is a server in
    processes of its own; rounds alternate, and figures are medians with their
    spread: cold and warm start, compilations, time to first token,
    inter-token latency, throughput, peak memory, padding per graph, greedy
    tokens with the first difference and both sides' logits there, and the
    errors of all logits against transformers.

    The exit code is 0 if the candidate passes, 3 if it does not (answers
    differ, more error than rounding explains, or a threshold is missed), and
    1 if the comparison cannot be made.
    """
    from vllm_neuron.cli import compare as command
    from vllm_neuron.cli.tables import result_console
    from vllm_neuron.cli.validate import prompts_of
    from vllm_neuron.comparison.compare import Thresholds
    from vllm_neuron.comparison.workload import Workload, vocabulary_of

    with exiting_on_errors():
        _require_model_first(model)
        own = (shlex.split(baseline_flags), shlex.split(candidate_flags))
        sides = command.sides_of((baseline, candidate), flags or (), own)
        workload = Workload(
            requests,
            concurrency,
            prompt_tokens,
            output_tokens,
            vocabulary_of(model),
            tuple(prompts_of(prompts)),
            greedy_tokens,
        )
        thresholds = Thresholds(min_agreement, near_tie, max_slowdown, max_memory)
        found = command.run(model, sides, workload, rounds, cold, accuracy, thresholds, logs, _progress)
        if html is not None:
            html.write_text(command.as_html(found, model))
        if as_json:
            typer.echo(command.as_json(found))
        else:
            command.show(found, result_console())
    raise typer.Exit(0 if found.passed else FAILED)


def validate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|URL", help="Folder or name of the model, or a running server.")
    ],
    flags: Flags = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="hf|DIR|URL",
            help="hf: transformers on the same checkpoint; DIR: on another one; URL: a running server.",
        ),
    ] = "hf",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the forced continuations.")] = 32,
    prompts: Prompts = None,
    factor: Annotated[
        float, typer.Option(min=1, help="How many times transformers' own rounding error may be reached.")
    ] = 2.0,
    top_k: Annotated[int, typer.Option(min=1, help="k of the top-k agreement.")] = 5,
    layers: Annotated[bool, typer.Option(help="Look at what each layer leaves, too.")] = True,
    min_agreement: Annotated[
        float, typer.Option(min=0, max=1, help="Of two servers: share of positions with the same likeliest token.")
    ] = 0.95,
    max_kl: Annotated[float, typer.Option(min=0, help="Of two servers: largest mean divergence, in nats.")] = 0.02,
    tasks: Annotated[str, typer.Option(metavar="TASK,...", help="Tasks of lm-eval to run on both sides.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task. Default: all.")] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Of the servers.")] = "none",
    as_json: AsJson = False,
) -> None:
    """Check logits along a forced continuation, and say where a difference begins.

    MODEL and the flags of `vllm serve` run on the compiled graphs that serve
    them, without a server. The truth is transformers one precision up
    (float32 of a model in bfloat16), and transformers in the served dtype
    says how much rounding explains: an error may be --factor times that. The
    first layer, prompt and position beyond it are named.

    Two running OpenAI servers are compared by the log probabilities that they
    tell: vllm-neuron validate URL --against URL.

    The exit code is 0 if it passes, 3 if it does not, and 1 if it cannot be
    made.
    """
    from vllm_neuron.cli import validate as command
    from vllm_neuron.cli.tables import result_console

    with exiting_on_errors():
        _require_model_first(model)
        choices = command.Choices(
            tokens,
            factor,
            top_k,
            layers,
            command.prompts_of(prompts),
            [task for task in tasks.split(",") if task],
            limit,
            min_agreement,
            max_kl,
            api_key,
        )
        outcome = command.run(model, flags or (), against, choices, _progress)
        if as_json:
            typer.echo(command.as_json(outcome))
        else:
            command.show(outcome, result_console())
    raise typer.Exit(0 if outcome.passed else FAILED)


def advise(
    from_log: Annotated[Path | None, typer.Option(metavar="FILE", help="Log of `vllm serve`.")] = None,
    from_metrics: Annotated[
        str | None, typer.Option(metavar="FILE|URL", help="What /metrics of a server has answered, or its address.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='Lines of "prompt [output]" tokens, JSON lines, or a result of vllm bench serve.'
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Largest prefill step. Default: the longest prompt, or step, of the sample."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Largest decode step. With --lengths, requests in flight at once, too."),
    ] = None,
    max_buckets: Annotated[int, typer.Option(min=1, help="Buckets of the longest list that is considered.")] = 8,
    gain: Annotated[
        float, typer.Option(min=0, max=1, help="Share of all rows that a bucket more must save to be proposed.")
    ] = 0.01,
    multiple: Annotated[int, typer.Option(min=1, help="Token buckets are multiples of this.")] = 128,
    context_buckets: Annotated[
        int, typer.Option(min=1, help="Contexts that each decode batch is compiled for, max_model_len included.")
    ] = 1,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Propose bucket lists for a sample of traffic, with the padding and the number of graphs of each choice.

    The lists are optimal: no other list of as many buckets pads the sample
    less. The default lists and buckets at percentiles of the lengths stand
    beside them.
    """
    from vllm_neuron.cli import advise as command
    from vllm_neuron.cli.tables import result_console

    with exiting_on_errors():
        traffic = command.read(from_log, from_metrics, lengths)
        limits = command.Limits(max_num_batched_tokens, max_num_seqs, max_buckets, gain, multiple, context_buckets)
        advices = command.run(traffic, limits)
        if html is not None:
            html.write_text(command.as_html(advices))
        if as_json:
            typer.echo(command.as_json(advices))
        else:
            command.show(advices, result_console())


def _require_model_first(model: str) -> None:
    """Among flags that only vLLM knows, nothing tells a value from a model."""
    from vllm_neuron.cli.errors import CommandError

    if model.startswith("-"):
        raise CommandError(f"MODEL is missing, or comes after {model}. Name it before the flags of vllm serve.")


def _progress(text: str) -> None:
    """Say on standard error what is being done."""
    typer.echo(text, err=True)
