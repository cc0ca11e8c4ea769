"""How the compiler and the runtime say that device memory (HBM) is too small, in the words of their documentation."""

import re

_SIGNATURES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"NCC_EOOM002",
        r"Maximum peak HBM usage",
        r"NRT_RESOURCE\b(?:.*?\bnrt_load_util\b)?",
        r"nrt_tensor_allocate\b.{0,80}?\bstatus\s*[=:]?\s*4\b",
        r"Allocation Failure",
    )
)


def hbm_signature(text: str) -> str | None:
    """The first sign of an HBM allocation failure, as ``text`` has it; None if there is none."""
    return next((found[0] for pattern in _SIGNATURES if (found := pattern.search(text))), None)
