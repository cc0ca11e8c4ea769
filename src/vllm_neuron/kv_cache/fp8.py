"""The range of 8-bit floats in the KV cache, which depends on the hardware."""

CALIBRATED_FOR = 448.0
"""What a calibrated scale maps the largest magnitude to: the largest value of float8_e4m3fn."""

_LIMITS = {"cpu": CALIBRATED_FOR, "trn3": CALIBRATED_FOR, "trn2": 240.0}


def limit_of(platform: str) -> float:
    """The largest magnitude that an FP8 KV cache stores.

    Trainium 2 has the float8_e4m3 of IEEE's kind, with infinities, which ends at 240; float8_e4m3fn ends at 448.

    Args:
        platform: "cpu", "trn2" or "trn3".
    """
    return _LIMITS[platform]


def stretch_of(limit: float) -> float:
    """What a calibrated scale is multiplied by, so that its largest magnitude stays within ``limit``.

    A power of two: it shifts exponents and leaves the bits of every number as they are, so that nothing but the range
    of the smallest numbers is lost. Clamping alone would cut off everything above 240 / 448 of the calibrated maximum.
    """
    stretch = 1.0
    while CALIBRATED_FOR / stretch > limit:
        stretch *= 2
    return stretch
