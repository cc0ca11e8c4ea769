"""What to do when Neuron's compiler or runtime finds too little device memory. None of it was seen on a device."""

import re

from vllm_neuron import envs

SIGNATURES = (
    r"NCC_EOOM002",
    r"Maximum peak HBM usage",
    r"nrt_load_util.*NRT_RESOURCE|NRT_RESOURCE.*nrt_load_util",
    r"nrt_tensor_allocate.*status=4",
    r"Allocation Failure",
)
"""Texts that the configuration reference lists."""

HEADROOM = "VLLM_NEURON_RESERVED_HEADROOM_GIB"
CAP = "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"
GUIDE = "docs/troubleshooting.md#hbm-allocation-errors-during-load-or-compilation"


def advice(error: BaseException) -> str | None:
    """How to leave more device memory beside the KV cache, if that is what `error` or a cause of it is about."""
    if not any(re.search(signature, _texts(error), re.DOTALL) for signature in SIGNATURES):
        return None
    headroom = envs.read(HEADROOM)
    if headroom is None:
        remedy = f"lower {CAP}, which is {envs.read(CAP):g}"
    else:
        remedy = f"set {HEADROOM} to {headroom + 1:g}, which is {headroom:g} now"
    return f"The KV cache may leave too little device memory for the rest: {remedy}. See {GUIDE}."


def _texts(error: BaseException) -> str:
    texts = []
    following: BaseException | None = error
    while following is not None:
        texts.append(str(following))
        following = following.__cause__ or following.__context__
    return "\n".join(texts)
