"""What `vllm-neuron compile` asks of vLLM: its flags, the configuration they make, and the size of the KV cache."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from vllm_neuron import envs
from vllm_neuron.config import ConfigurationError, ResolvedConfig, log_notices
from vllm_neuron.engine.compiler import GraphCompiler, open_cache
from vllm_neuron.plugin.activation import ActivationError, activate
from vllm_neuron.plugin.arguments import ArgumentsError, parse_arguments, quiet_vllm
from vllm_neuron.plugin.models import served_model
from vllm_neuron.plugin.routes import working_route
from vllm_neuron.plugin.settings import model_dtype, resolved_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CompileFaultsError(RuntimeError):
    """What was asked for cannot be compiled.

    Attributes:
        faults: everything that is wrong, a line each.
    """

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(" ".join(fault.split()) for fault in faults)
        super().__init__("\n".join(self.faults))


@dataclass(frozen=True)
class CompileJob:
    """A configuration that is ready to be compiled.

    Attributes:
        compiler: compiles its graphs.
        notes: what the user should know about the result.
    """

    compiler: GraphCompiler
    notes: tuple[str, ...]


def prepare(arguments: Sequence[str], artifacts: Path | None) -> CompileJob:
    """The job that a command line of `vllm serve` asks for. Reads config.json and no weight; takes no KV cache memory.

    Args:
        arguments: model and flags, as they follow `vllm serve`.
        artifacts: folder of compiled graphs to fill; None is NEURON_COMPILED_ARTIFACTS, if that is set.

    Raises:
        CompileFaultsError: the flags, the configuration, the environment or this machine do not allow it.
    """
    require_platform()
    vllm_config = engine_config(arguments)
    config = resolved_config(vllm_config)
    _require_one_folder(config, artifacts)
    if artifacts is not None:
        config = replace(config, compiled_artifacts=str(artifacts))
    log_notices(config)
    from vllm_neuron.plugin.memory import expected_blocks

    try:
        model = served_model(vllm_config)
        route = working_route(config)
        blocks = expected_blocks(vllm_config, model)
        cache = open_cache(config, route)
    except (RuntimeError, ValueError, OSError) as error:
        raise CompileFaultsError([str(error)]) from error
    compiler = GraphCompiler(model, config, route, cache, model_dtype(vllm_config), blocks.num_blocks)
    return CompileJob(compiler, (_measured_note(blocks.num_blocks),) if blocks.measured else ())


def engine_config(arguments: Sequence[str]) -> "VllmConfig":
    """The configuration that `vllm serve` would make of these arguments.

    Raises:
        CompileFaultsError: they are not valid; all faults of the configuration together.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    args = _parse(arguments)
    try:
        # The defaults of some limits depend on who asks.
        return AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except ConfigurationError as error:
        raise CompileFaultsError(map(str, error.faults)) from error
    except ValidationError as error:
        raise CompileFaultsError(_validation_faults(error)) from error
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise CompileFaultsError([str(error)]) from error


def require_platform() -> None:
    """Check that vLLM uses this plugin here, before anything of vLLM that would choose another platform runs.

    Raises:
        CompileFaultsError: it does not.
    """
    quiet_vllm()
    try:
        if activate() is None:
            raise CompileFaultsError(
                [
                    "There is no Neuron device here, and neither VLLM_NEURON_CPU_MODE=1 nor VLLM_NEURON_CPU_COMPILE=1 "
                    "is set. Set VLLM_NEURON_CPU_COMPILE=1 and NEURON_PLATFORM_TARGET_OVERRIDE to compile for Neuron, "
                    "or VLLM_NEURON_CPU_MODE=1 to compile for the CPU."
                ]
            )
    except (ActivationError, envs.EnvironmentVariableError) as error:
        raise CompileFaultsError([str(error)]) from error
    from vllm.platforms import current_platform

    if not current_platform.is_out_of_tree():
        raise CompileFaultsError(["VLLM_PLUGINS keeps vLLM from loading this plugin: add neuron to it, or unset it."])


def _require_one_folder(config: ResolvedConfig, artifacts: Path | None) -> None:
    if config.disable_compile_cache:
        raise CompileFaultsError(
            ["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1 keeps no graph, so nothing would be left. Unset it."]
        )
    variable = config.compiled_artifacts
    if artifacts is not None and variable is not None and Path(variable).resolve() != artifacts.resolve():
        raise CompileFaultsError(
            [
                f"--output={artifacts} and NEURON_COMPILED_ARTIFACTS={variable} name two folders. Leave one of them "
                "out, or name the same folder."
            ]
        )


def _measured_note(num_blocks: int) -> str:
    return (
        f"The KV cache has {num_blocks} blocks, which is part of every graph and follows from the memory that is free "
        f"on this machine now. Add --num-gpu-blocks-override {num_blocks} where these graphs are served from, so that "
        "the server asks for the same."
    )


def _parse(arguments: Sequence[str]) -> Namespace:
    try:
        args = parse_arguments(arguments)
    except ArgumentsError as error:
        raise CompileFaultsError([str(error)]) from error
    if args.model is None:
        raise CompileFaultsError(["MODEL is missing: name a folder of Hugging Face's form, or a model of the hub."])
    return args


def _validation_faults(error: ValidationError) -> Iterator[str]:
    """A line per fault of pydantic's error, which wraps what a configuration's own checks have raised."""
    for fault in error.errors():
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, ConfigurationError):
            yield from map(str, cause.faults)
        elif cause is not None:
            yield str(cause)
        else:
            place = ".".join(map(str, fault["loc"]))
            yield f"{place}={fault.get('input')!r}: {fault['msg']}"
