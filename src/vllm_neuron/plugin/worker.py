"""The worker: loads one model, sizes its cache, makes its graphs ready, and runs steps."""

import logging
import os
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from vllm_neuron import envs
from vllm_neuron.config import effective_report, log_notices
from vllm_neuron.engine.compiler import open_cache
from vllm_neuron.engine.executor import GraphExecutor
from vllm_neuron.engine.graphs import list_graphs
from vllm_neuron.engine.hbm import hbm_failures_explained
from vllm_neuron.engine.memory import kv_cache_bytes
from vllm_neuron.plugin.kv_specs import kv_cache_specs, require_groups
from vllm_neuron.plugin.last_words import leaving_last_words
from vllm_neuron.plugin.memory import kv_budget
from vllm_neuron.plugin.metrics import EngineMetrics
from vllm_neuron.plugin.metrics_folder import reserve_for_engine
from vllm_neuron.plugin.model_runner import NeuronModelRunner
from vllm_neuron.plugin.models import served_model
from vllm_neuron.plugin.processes import seconds_since_start, settle_engine_process
from vllm_neuron.plugin.routes import working_route
from vllm_neuron.plugin.settings import model_dtype, resolved_config
from vllm_neuron.plugin.weights import load_model_weights
from vllm_neuron.weights.loading import total_bytes

logger = logging.getLogger(__name__)


class NeuronWorker(WorkerBase):
    """One device, or the CPU in its place. vLLM calls the methods in the order in which they stand here."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        settle_engine_process()
        self.config = resolved_config(vllm_config)
        self._executor: GraphExecutor | None = None
        self._runner: NeuronModelRunner | None = None
        # Compilers of daemonic processes cannot have processes of their own.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    @leaving_last_words
    def init_device(self) -> None:
        """Report the configuration, check the route, and make vLLM's process groups.

        Raises:
            RuntimeError: the compile route does not work here, or this machine only compiles.
        """
        logger.info("%s", effective_report(self.config, envs.effective()))
        log_notices(self.config)
        if self.config.cpu_compile:
            raise RuntimeError(
                f"VLLM_NEURON_CPU_COMPILE=1 compiles for {self.config.platform_target} and cannot serve. Run "
                f"vllm-neuron compile {self.model_config.model} with the same flags to compile all graphs, and serve "
                "them on a machine with Neuron devices."
            )
        self.route = working_route(self.config)
        self.device = torch.device("cpu")
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            self.current_platform.dist_backend,
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        set_random_seed(self.model_config.seed)
        self.model = served_model(self.vllm_config)

    @leaving_last_words
    def load_model(self) -> None:
        """Read the weights and hand them to the route.

        Raises:
            CheckpointError: the checkpoint is not readable, or does not fit the model.
            ArtifactsError: NEURON_COMPILED_ARTIFACTS is no folder of compiled graphs.
            HBMAllocationError: the weights do not fit into device memory.
        """
        cache = open_cache(self.config, self.route)
        self.metrics = self._new_metrics()
        start = time.monotonic()
        weights = load_model_weights(self.vllm_config, self.model)
        dtype = model_dtype(self.vllm_config)
        with hbm_failures_explained(self.config):
            self._executor = GraphExecutor(
                self.model, self.config, self.route, cache, weights, dtype, on_step=self.metrics.step
            )
        self.metrics.loaded(time.monotonic() - start, total_bytes(self.model.weight_table, dtype))

    def _new_metrics(self) -> EngineMetrics:
        reserve_for_engine()
        parallel = self.parallel_config
        rank = parallel.data_parallel_rank * parallel.world_size + self.rank
        name = str(self.model_config.served_model_name)
        return EngineMetrics(list_graphs(self.config), name, rank, counts_steps=self.is_driver_worker)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What vLLM's block manager needs to know of each attention layer."""
        return kv_cache_specs(self.model, self.config.block_size, model_dtype(self.vllm_config))

    @leaving_last_words
    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take.

        Raises:
            KVBudgetError: too little memory for the configured minimum or for one request.
        """
        budget = kv_budget(self.vllm_config, self.model, weights_loaded=True)
        return kv_cache_bytes(self.config, self.model, model_dtype(self.vllm_config), budget)

    @leaving_last_words
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache.

        Raises:
            HBMAllocationError: it does not fit into device memory.
        """
        require_groups(kv_cache_config, self.model)
        with hbm_failures_explained(self.config):
            self.executor.allocate_kv_cache(kv_cache_config.num_blocks)
        self._runner = NeuronModelRunner(
            self.vllm_config, self.executor, self.model, len(kv_cache_config.kv_cache_groups)
        )

    @leaving_last_words
    def compile_or_warm_up_model(self) -> None:
        """Make every graph ready, and the sampler too: after this nothing compiles.

        Raises:
            HBMAllocationError: a graph does not fit into device memory beside the KV cache.
        """
        with hbm_failures_explained(self.config):
            self.executor.warm_up()
        self.runner.warm_up_sampler()
        # Warm-up draws random numbers, and the same seed must give the same tokens however long it was.
        set_random_seed(self.model_config.seed)
        self.metrics.warmed_up(self.executor.statistics.seconds, seconds_since_start())

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Note how many blocks there are; they are allocated already."""
        self.cache_config.num_gpu_blocks = num_gpu_blocks
        self.cache_config.num_cpu_blocks = num_cpu_blocks

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """Text generation only."""
        return ("generate",)

    @leaving_last_words
    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step up to its logits; None means that `sample_tokens` is to be called next."""
        output = self.runner.execute_model(scheduler_output)
        late = {"compiles_after_warmup": self.executor.statistics.compiles_after_warmup}
        self.metrics.follow(vars(self.runner.async_statistics) | late)
        return output

    @leaving_last_words
    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample the next tokens of the step that `execute_model` has begun."""
        return self.runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """There is nothing to do for a rank without requests: it has no peer to keep in step with."""

    def graph_statistics(self) -> dict[str, Any]:
        """Which graphs were compiled, cached and run, and which steps did not wait for the one before.

        See `GraphStatistics` and `AsyncStatistics`.
        """
        statistics = vars(self.executor.statistics) | vars(self.runner.async_statistics)
        return {name: dict(value) if isinstance(value, dict) else value for name, value in statistics.items()}

    def check_health(self) -> None:
        """A worker that has lost its KV cache in a failed step cannot go on.

        Raises:
            RuntimeError: it has lost the cache, or has not been started fully.
        """
        if self._executor is None or not self._executor.has_kv_cache:
            raise RuntimeError("The worker has no KV cache: it is not started fully, or a step has failed half-way.")

    def get_model_inspection(self) -> str:
        """What `repr(LLM(...))` shows: the model is functions and a table of weights, not modules."""
        return "\n".join(
            (self.model.architecture, *(f"  {name} {list(s.shape)}" for name, s in self.model.weight_table.items()))
        )

    def update_max_model_len(self, max_model_len: int) -> None:
        """Never called: max_model_len is fixed before memory is measured."""
        raise RuntimeError(f"max_model_len cannot be changed to {max_model_len} any more. Set it at start.")

    def sleep(self, level: int = 1) -> None:
        """Refused."""
        raise RuntimeError(f"not supported yet: sleep mode (level={level}). Stop the server instead.")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Refused."""
        raise RuntimeError("not supported yet: sleep mode. The worker never sleeps.")

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Refused."""
        raise RuntimeError("not supported yet: profiling. Use an external profiler on the engine's process.")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Refused."""
        raise RuntimeError(f"not supported yet: LoRA adapters ({lora_request.lora_name}).")

    def remove_lora(self, lora_id: int) -> bool:
        """Refused."""
        raise RuntimeError(f"not supported yet: LoRA adapters (id {lora_id}).")

    def pin_lora(self, lora_id: int) -> bool:
        """Refused."""
        raise RuntimeError(f"not supported yet: LoRA adapters (id {lora_id}).")

    def list_loras(self) -> set[int]:
        """There are none."""
        return set()

    def shutdown(self) -> None:
        """Let go of weights, cache and graphs."""
        if self._executor is not None:
            self._executor.close()
        self._runner = None
        self._executor = None

    @property
    def executor(self) -> GraphExecutor:
        """What runs the graphs.

        Raises:
            RuntimeError: the model is not loaded.
        """
        if self._executor is None:
            raise RuntimeError("The model is not loaded.")
        return self._executor

    @property
    def runner(self) -> NeuronModelRunner:
        """What turns vLLM's steps into graph calls.

        Raises:
            RuntimeError: the KV cache is not allocated.
        """
        if self._runner is None:
            raise RuntimeError("The KV cache is not allocated.")
        return self._runner
