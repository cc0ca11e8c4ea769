"""Case STO-3: constraints hold whatever VLLM_USE_V2_MODEL_RUNNER says. The other tests leave it unset."""

import pytest

from tests.checkpoints import checkpoint
from tests.serving.engine import TINY_ENGINE, prompt, running_llm


@pytest.mark.parametrize("runner", ["0", "1"])
def test_real_constraint_holds_with_either_runner(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    bound = SamplingParams(temperature=1.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    free = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    neuron = {**TINY_ENGINE["additional_config"]["neuron_config"], "on_device_sampling_config": {}}
    with running_llm(checkpoint("llama"), "neuron_native", additional_config={"neuron_config": neuron}) as llm:
        prompts = [{"prompt_token_ids": prompt(15, seed=seed)} for seed in range(2)]
        constrained, plain = (output.outputs[0] for output in llm.generate(prompts, [bound, free], use_tqdm=False))
    assert len(constrained.text) == 3 and constrained.text.isdigit()
    assert len(plain.token_ids) == 8
