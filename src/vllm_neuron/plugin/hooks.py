"""The hooks of vLLM without which a constraint would be lost in silence, looked for at start.

A vLLM that has moved one of them still calls what it knows, and answers free text where JSON was asked for.
"""

from importlib.metadata import version

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.worker_base import WorkerBase

HOOKS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Scheduler, ("schedule", "update_from_output", "get_grammar_bitmask")),
    (SchedulerOutput, ("has_structured_output_requests", "pending_structured_output_tokens")),
    (GrammarOutput, ("structured_output_request_ids", "grammar_bitmask")),
    (WorkerBase, ("execute_model", "sample_tokens")),
)
"""Classes, and the methods and fields of theirs through which masks reach the worker."""


def require_hooks() -> None:
    """Check that this vLLM has every hook.

    Raises:
        RuntimeError: it lacks some, which are named.
    """
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in HOOKS
        for name in names
        if name not in (getattr(owner, "__dataclass_fields__", None) or vars(owner))
    ]
    if missing:
        raise RuntimeError(
            f"vLLM {version('vllm')} lacks {', '.join(missing)}, which this plugin needs for structured outputs. "
            "Install the vLLM that this plugin names as its dependency."
        )
