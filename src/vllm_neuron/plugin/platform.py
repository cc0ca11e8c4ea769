"""The platform that vLLM sees.

Every tensor that vLLM itself handles (block tables, sampling) lives on the host, so to vLLM the device is "cpu" in
every mode; the compile route alone knows where weights, cache and graphs are.
"""

import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_neuron import envs
from vllm_neuron.config import ConfigurationError, Fault, ResolvedConfig, resolve
from vllm_neuron.plugin.admission import Admission, model_defaults, server_defaults, unsupported_with_sampling
from vllm_neuron.plugin.capabilities import unsupported
from vllm_neuron.plugin.constraints import check_constraint
from vllm_neuron.plugin.embeddings import EmbeddingsForm, replace_reader, usable_embeddings
from vllm_neuron.plugin.external_models import register_external_models
from vllm_neuron.plugin.metrics_folder import prepare_folder
from vllm_neuron.plugin.ports import refuse_shared_port
from vllm_neuron.plugin.processes import note_start
from vllm_neuron.plugin.routes import require_packages
from vllm_neuron.plugin.settings import (
    model_dtype,
    remember_unset_limits,
    serving_settings,
    store_config,
    stored_config,
    take_unset_limits,
)
from vllm_neuron.plugin.shutdown import bound_graceful_shutdown, end_when_interrupted_in_warm_up

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

WORKER = "vllm_neuron.plugin.worker.NeuronWorker"
SCHEDULER = "vllm_neuron.plugin.scheduler.NeuronScheduler"
ASYNC_SCHEDULER = "vllm_neuron.plugin.scheduler.NeuronAsyncScheduler"

GIB = 1 << 30


class NeuronPlatform(Platform):
    """AWS Neuron, or the CPU in its place."""

    _enum = PlatformEnum.OOT
    # vLLM makes torch devices of both.
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    # vLLM's small torch.compile helpers run eagerly: compiling one would stall the first request that needs it.
    simple_compile_backend = "eager"

    max_model_len: ClassVar[int | None] = None
    vocab_size: ClassVar[int | None] = None
    embeddings_form: ClassVar[EmbeddingsForm | None] = None
    admission: ClassVar[Admission | None] = None
    """All of the engine configured last in this process; requests are checked before they reach it."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Called before command lines are parsed and before an engine's configuration is made."""
        remember_unset_limits()
        bound_graceful_shutdown()
        register_external_models()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Resolve the configuration, store it, and make vLLM's own configuration agree with it.

        Raises:
            RuntimeError: this vLLM lacks what structured outputs need.
            ConfigurationError: all faults together, before any weight is read.
            RuntimeError: packages of the compile route are missing, or the devices here are of no known kind.
            PortInUseError: another server listens on this one's port.
            OSError: there is no space for the metrics.
        """
        unset_limits = take_unset_limits()
        if vllm_config.model_config is None or stored_config(vllm_config) is not None:
            return
        # Imported where it is needed: it imports vLLM's scheduler.
        from vllm_neuron.plugin.hooks import require_hooks

        require_hooks()
        refuse_shared_port()
        note_start()
        prepare_folder()
        end_when_interrupted_in_warm_up()
        resolved = _resolve(vllm_config, unset_limits)
        if not resolved.cpu_compile:  # which serves nothing, and whose own command asks for more than packages
            require_packages(resolved)
        _adopt(vllm_config, resolved)
        _choose_classes(vllm_config)
        _normalise_runner_variable()
        store_config(vllm_config, resolved)
        cls.max_model_len = resolved.max_model_len
        cls.vocab_size = vllm_config.model_config.get_vocab_size()
        cls.admission = _admission(vllm_config.model_config, resolved)
        cls.embeddings_form = None
        if resolved.enable_prompt_embeds:
            hidden_size = vllm_config.model_config.get_hidden_size()
            cls.embeddings_form = EmbeddingsForm(hidden_size, model_dtype(vllm_config), resolved.max_model_len)
            replace_reader()

    @classmethod
    def validate_request(cls, prompt: Any, params: Any, processed_inputs: Any) -> None:
        """Refuse what would never finish, token ids that the embedding has no row for, what cannot be sampled, and
        unusable embeddings.

        Embeddings are put into `processed_inputs` as the engine takes them.

        Raises:
            ValueError: the prompt leaves no room for a single output token, has an id outside the vocabulary, or is
                embeddings that `usable_embeddings` refuses; or the request has an empty constraint, or asks for what
                on-device sampling cannot do.
        """
        from vllm.sampling_params import SamplingParams

        if isinstance(params, SamplingParams):
            check_constraint(params.structured_outputs)
            if cls.admission is not None:
                cls.admission.check(params)
        token_ids = processed_inputs.get("prompt_token_ids") or ()
        if cls.vocab_size is not None and token_ids:
            for token_id in (min(token_ids), max(token_ids)):
                if not 0 <= token_id < cls.vocab_size:
                    raise ValueError(
                        f"Token id {token_id} of the prompt is not in the model's vocabulary: ids are 0 to "
                        f"{cls.vocab_size - 1}. If the prompt is a text, the tokenizer is another model's."
                    )
        if cls.max_model_len is not None and len(token_ids) >= cls.max_model_len:
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens and max_model_len is {cls.max_model_len}, which leaves no "
                f"room for an answer. Shorten the prompt to at most {cls.max_model_len - 1} tokens."
            )
        if cls.embeddings_form is not None and processed_inputs.get("type") == "embeds":
            embeddings = processed_inputs["prompt_embeds"]
            processed_inputs["prompt_embeds"] = usable_embeddings(embeddings, params, cls.embeddings_form)

    @classmethod
    def import_kernels(cls) -> None:
        """None of vLLM's own kernels runs here, and importing them fails loudly where there is no CUDA."""

    @classmethod
    def get_compile_backend(cls) -> str:
        """vLLM's default, so that it does not warn of another; vLLM compiles no model here (CompilationMode.NONE)."""
        return "inductor"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Name for logs."""
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Memory in bytes, but below what makes vLLM pick its defaults for large GPUs: those of max_num_seqs and
        max_num_batched_tokens, and with them the bucket lists, must not depend on the host."""
        return min(psutil.virtual_memory().total, 64 * GIB)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one device per worker."""

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Dtypes are checked with the rest of the configuration."""

    @classmethod
    def inference_mode(cls) -> Any:
        """vLLM's steps run without autograd."""
        return torch.inference_mode()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Host memory is not pinned."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Layers with and without a sliding window may have different KV groups."""
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Collectives over gloo."""
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


def _resolve(vllm_config: "VllmConfig", unset_limits: frozenset[str]) -> ResolvedConfig:
    """The configuration, or the faults of both sources in one error."""
    faults: list[Fault] = []
    resolved = None
    try:
        resolved = resolve(serving_settings(vllm_config, unset_limits), vllm_config.additional_config)
    except ConfigurationError as error:
        faults += error.faults
    faults += unsupported(vllm_config)
    if resolved is not None:
        faults += unsupported_with_sampling(vllm_config, resolved)
    if faults or resolved is None:
        raise ConfigurationError(faults)
    return resolved


def _adopt(vllm_config: "VllmConfig", resolved: ResolvedConfig) -> None:
    from vllm.config import CompilationMode, CUDAGraphMode

    scheduler, cache, compilation = (
        vllm_config.scheduler_config,
        vllm_config.cache_config,
        vllm_config.compilation_config,
    )
    scheduler.max_num_batched_tokens = resolved.max_num_batched_tokens
    scheduler.max_num_seqs = resolved.max_num_seqs
    scheduler.async_scheduling = resolved.async_scheduling
    cache.block_size = resolved.block_size  # type: ignore[assignment]
    cache.gpu_memory_utilization = resolved.gpu_memory_utilization
    cache.enable_prefix_caching = resolved.enable_prefix_caching
    vllm_config.model_config.disable_cascade_attn = True
    # Graphs are compiled by our routes, not by vLLM.
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []


def _admission(model: "ModelConfig", resolved: ResolvedConfig) -> Admission | None:
    """Make the server's sampling defaults those of vLLM's front end, and know what requests may ask beyond them."""
    if resolved.on_device_sampling is None:
        return None
    of_model, overrides = model_defaults(model), model.override_generation_config
    defaults = server_defaults(resolved.on_device_sampling, {**of_model, **overrides})
    model.override_generation_config = {**overrides, **defaults}
    return Admission(resolved.on_device_sampling, of_model)


def _choose_classes(vllm_config: "VllmConfig") -> None:
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = WORKER
    ours = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = ours
    elif scheduler.scheduler_cls != ours:
        logger.warning(
            "scheduler_cls=%s is kept. It must never put prefill and decode into one step, nor two prefills; a step "
            "that does ends the engine. Leave scheduler_cls out to use %s.",
            scheduler.scheduler_cls,
            ours,
        )


def _normalise_runner_variable() -> None:
    if envs.is_set("VLLM_USE_V2_MODEL_RUNNER"):
        # vLLM itself understands digits only.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(envs.VLLM_USE_V2_MODEL_RUNNER))
