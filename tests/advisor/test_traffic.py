"""Samples of traffic from every source."""

import json
from pathlib import Path

import pytest

from vllm_neuron.advisor.traffic import (
    TrafficError,
    from_lengths,
    from_log,
    from_metrics,
    simulate_decoding,
    split_prompts,
)


def test_prompts_are_split_over_steps() -> None:
    assert split_prompts({100: 2, 600: 1, 512: 1}, 256) == {100: 2, 256: 4, 88: 1}


def test_batches_of_a_closed_loop() -> None:
    """Two clients: 3 and 5 tokens, then 2 tokens in the place of the first. The first token is the prefill's."""
    assert simulate_decoding([3, 5, 2], 2) == {2: 3, 1: 1}
    assert simulate_decoding([1, 1], 2) == {}
    assert simulate_decoding([4, 4, 4], 8) == {3: 3}


BENCH = json.dumps({"input_lens": [10, 20], "output_lens": [5, 6], "ttfts": [0.1, 0.2]})
USAGE = '{"prompt_tokens": 10, "completion_tokens": 5}\n{"usage": {"prompt_tokens": 20, "completion_tokens": 6}}\n'


@pytest.mark.parametrize("text", ["# prompt output\n10 5\n20, 6\n", BENCH, USAGE])
def test_lengths_in_every_form(text: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(text)
    traffic = from_lengths(tmp_path / "lengths")
    assert traffic.prompts == {10: 1, 20: 1}
    assert list(traffic.outputs) == [(10, 5), (20, 6)]


@pytest.mark.parametrize("text", ["", "ten\n", "1 2 3\n", "0\n", '{"prompt": 3}\n', '{"input_lens": [1]}'])
def test_lengths_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(TrafficError, match="--lengths="):
        from_lengths(tmp_path / "lengths")


LOG = """
DEBUG [logger.py:1] Request cmpl-1-0 details: prompt: None, prompt_token_ids: [5, 6, 7], prompt_embeds shape: None.
INFO [logger.py:2] Received request cmpl-1-0: params: SamplingParams(n=1), lora_request: None.
INFO [logger.py:3] Generated response cmpl-1-0: output: ' x', output_token_ids: [8, 9], finish_reason: length
INFO [loggers.py:4] Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs
INFO [loggers.py:4] Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs
"""


def test_a_log_tells_lengths_and_running_requests(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    traffic = from_log(tmp_path / "log")
    assert traffic.prompts == {3: 1} and traffic.decode_steps == {3: 1} and list(traffic.outputs) == [(3, 2)]


def test_vllm_still_logs_in_this_form(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The reader goes by what vLLM's own logger writes."""
    import logging

    from vllm import SamplingParams
    from vllm.entrypoints.logger import RequestLogger

    caplog.handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("vllm.entrypoints.logger")
    logger.addHandler(caplog.handler)
    try:
        caplog.set_level(logging.DEBUG, logger=logger.name)
        writer = RequestLogger(max_log_len=None)
        writer.log_inputs("cmpl-7", None, [1, 2, 3, 4], None, SamplingParams(), None)
        writer.log_outputs("cmpl-7", " x", [5, 6], "length", is_streaming=True)
    finally:
        logger.removeHandler(caplog.handler)
    (tmp_path / "log").write_text(caplog.text)
    traffic = from_log(tmp_path / "log")
    assert traffic.prompts == {4: 1} and list(traffic.outputs) == [(4, 2)]


def test_a_log_without_either_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("INFO nothing\n")
    with pytest.raises(TrafficError, match="--enable-log-requests"):
        from_log(tmp_path / "log")


LABELS = 'model_name="m",rank_id="0"'
METRICS = f"""
# TYPE vllm_neuron:num_batched_tokens_padding histogram
vllm_neuron:num_batched_tokens_padding_bucket{{{LABELS},bucket_name="prefill_t512_ctx2048",le="0.0"}} 2
vllm_neuron:num_batched_tokens_padding_bucket{{{LABELS},bucket_name="prefill_t512_ctx2048",le="64.0"}} 2
vllm_neuron:num_batched_tokens_padding_bucket{{{LABELS},bucket_name="prefill_t512_ctx2048",le="128.0"}} 5
vllm_neuron:num_batched_tokens_padding_bucket{{{LABELS},bucket_name="prefill_t512_ctx2048",le="+Inf"}} 6
vllm_neuron:num_batched_tokens_padding_count{{{LABELS},bucket_name="prefill_t512_ctx2048"}} 6
vllm_neuron:num_seqs_padding_bucket{{{LABELS},bucket_name="decode_b8_ctx2048",le="1.0"}} 4
vllm_neuron:num_seqs_padding_bucket{{{LABELS},bucket_name="decode_b8_ctx2048",le="+Inf"}} 4
"""


def test_padding_histograms_become_step_sizes() -> None:
    """A step has at least as many live rows as the least padding of its range leaves."""
    traffic = from_metrics(METRICS, "file")
    assert traffic.prefill_steps == {512: 2, 512 - 65: 3, 512 - 129: 1}
    assert traffic.decode_steps == {8: 4}


def test_vllms_own_histogram_of_prompts_is_read_where_ours_are_missing() -> None:
    text = 'vllm:request_prompt_tokens_bucket{engine="0",le="50.0"} 3\nvllm:request_prompt_tokens_bucket{le="100"} 3\n'
    text += 'vllm:request_prompt_tokens_bucket{engine="0",le="100.0"} 5\n'
    assert from_metrics(text, "file").prompts == {50: 3, 100: 5}


def test_metrics_without_any_of_them_are_refused() -> None:
    with pytest.raises(TrafficError, match="vllm_neuron:num_seqs_padding"):
        from_metrics("vllm:num_requests_running 0\n", "file")
