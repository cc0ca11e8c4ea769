"""The options of `additional_config`, as typed models. What depends on other options is checked elsewhere.

Types are strict: "256" is not an integer and neither is True. Null always means the same as leaving an option out.
"""

import itertools
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

SEGMENT_SIZES = (512, 1024, 2048, 4096, 8192)
CONTEXT_ALIGNMENT = 128
MAX_CANDIDATES = 256
"""Most tokens that on-device sampling chooses from."""


def _list_to_tuple(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of integers, such as [128, 256]")
    return tuple(value)


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values:
        raise ValueError("must not be empty")
    if any(value < 1 for value in values):
        raise ValueError("every value must be at least 1")
    if any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError("must be ascending, each value once")
    return values


def _segment_sizes(values: tuple[int, ...]) -> tuple[int, ...]:
    if any(value not in SEGMENT_SIZES for value in values):
        raise ValueError(f"every value must be one of {', '.join(map(str, SEGMENT_SIZES))}")
    if len(values) > 1:
        raise ValueError("only a single segment size is supported")
    return values


def _context_lengths(values: tuple[int, ...]) -> tuple[int, ...]:
    if any(value % CONTEXT_ALIGNMENT for value in values):
        raise ValueError(f"every value must be divisible by {CONTEXT_ALIGNMENT}")
    return values


def _number(value: Any) -> Any:
    """Numbers and numeric strings; the rest is left for the type check to refuse."""
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a number or a numeric string") from None


def _temperature(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("must be a finite number of at least 0")
    return value


def _top_k(value: int) -> int:
    if not -1 <= value <= MAX_CANDIDATES:
        raise ValueError(f"must be 1 to {MAX_CANDIDATES}, or 0 or -1 for {MAX_CANDIDATES} candidates")
    return value


def _top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError("must be above 0 and at most 1")
    return value


def _hold_time(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("must be a finite number of milliseconds, 0 or more")
    return value


Buckets = Annotated[tuple[int, ...], BeforeValidator(_list_to_tuple), AfterValidator(_ascending)]
SegmentSizes = Annotated[Buckets, AfterValidator(_segment_sizes)]
ContextLengths = Annotated[Buckets, AfterValidator(_context_lengths)]
Positive = Annotated[int, Field(ge=1)]


class _Options(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OnDeviceSamplingConfig(_Options):
    """The server's sampling defaults on the device, for requests that leave them unset."""

    temperature: Annotated[float, BeforeValidator(_number), AfterValidator(_temperature)] | None = Field(
        default=None, description="Divides the logits before the softmax; 0 is greedy."
    )
    top_k: Annotated[int, BeforeValidator(_number), AfterValidator(_top_k)] | None = Field(
        default=None, description="Number of candidates; 0 and -1 mean as many as the device allows."
    )
    top_p: Annotated[float, BeforeValidator(_number), AfterValidator(_top_p)] | None = Field(
        default=None, description="Probability mass of the candidates."
    )
    all_greedy: bool = Field(default=False, description="Compile an argmax-only graph.")


class NeuronConfig(_Options):
    """`additional_config.neuron_config`: settings of the text model."""

    num_batched_tokens_buckets: Buckets | None = Field(
        default=None, description="Prefill token counts that are compiled; the largest equals max_num_batched_tokens."
    )
    num_seqs_buckets: Buckets | None = Field(
        default=None, description="Decode batch sizes that are compiled; the largest equals max_num_seqs."
    )
    kv_segment_size_buckets: SegmentSizes | None = Field(
        default=None, description="Segment size of segmented prefill; null turns it off."
    )
    decode_context_length_buckets: ContextLengths | None = Field(
        default=None, description="Decode context lengths that are compiled besides max_model_len."
    )
    on_device_sampling_config: OnDeviceSamplingConfig | None = Field(
        default=None, description="Sample on the device; null samples on the CPU."
    )
    quantization: Literal["mxfp4", "mxfp8"] | None = Field(default=None, description="Weight quantization by Neuron.")
    quantized: bool = Field(default=False, description="Weights are quantized to quantization_dtype.")
    quantization_dtype: Literal["int8", "fp8", "f8e4m3"] | None = Field(
        default=None, description="Weight dtype that goes with quantized."
    )


class EncoderNeuronConfig(_Options):
    """`additional_config.encoder_neuron_config`: settings of a multimodal model's encoder."""

    num_encoder_input_buckets: Buckets | None = Field(
        default=None, description="Input sizes of one encoder pass that are compiled, in the encoder's own unit."
    )
    encoder_attention_block_size: Positive = Field(default=2048, description="Attention block; holds the largest item.")
    max_encoder_seq_len: Positive | None = Field(
        default=None, description="Cap of the buckets that are made automatically."
    )
    tp_size: Positive = Field(default=1, description="Tensor parallel degree of the encoder.")
    dp_size: Positive = Field(default=1, description="Data parallel degree of the encoder.")
    encoder_cache_num_blocks: Positive | None = Field(
        default=None, description="Floor of the encoder cache's block count."
    )
    encoder_cache_min_hold_time_ms: Annotated[float, AfterValidator(_hold_time)] | None = Field(
        default=None, description="Shortest time that a written block of the encoder cache stays allocated."
    )
