"""KVM-2: too few blocks for all requests lower concurrency; nothing is written out of place."""

from tests.checkpoints import checkpoint, greedy_oracle
from tests.serving.engine import generate, metric, prompt, running_llm


def test_real_blocks_for_one_request_serve_four_one_after_the_other() -> None:
    path = checkpoint("llama")
    prompts = [prompt(500, seed=i) for i in range(4)]
    expected = [greedy_oracle(path, ids, 12) for ids in prompts]
    # A request of 512 tokens takes 16 blocks, and block 0 is the null block.
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 17, "disable_log_stats": False}
    with running_llm(path, "neuron_native", **sizes) as llm:
        for _ in range(2):
            assert generate(llm, prompts, 12) == expected
        assert metric(llm, "vllm:kv_cache_usage_perc") == 0
