"""What a GPU can do at most, as its maker says."""

from typing import NamedTuple


class Peak(NamedTuple):
    """Operations in a second with dense matrices, in units of 10^12.

    Attributes:
        float32: without TF32.
        tf32: None where there are no such tensor cores.
        half: float16 and bfloat16, accumulated in float32.
    """

    float32: float
    tf32: float | None
    half: float


PEAKS = {
    "H100 PCIe": Peak(51.2, 378.0, 756.0),
    "H100 NVL": Peak(60.0, 417.5, 835.5),
    "H200 NVL": Peak(60.0, 417.5, 835.5),
    "H100": Peak(66.9, 494.7, 989.4),
    "H200": Peak(66.9, 494.7, 989.4),
    "A100": Peak(19.5, 156.0, 312.0),
    "A10": Peak(31.2, 62.5, 125.0),
    "L40S": Peak(91.6, 183.0, 362.0),
    "L4": Peak(30.3, 60.0, 121.0),
    "V100": Peak(15.7, None, 125.0),
    "T4": Peak(8.1, None, 65.0),
    "RTX 4090": Peak(82.6, 82.6, 165.2),
    "RTX 3090": Peak(35.6, 35.6, 71.0),
}
"""By a part of the name, the first that fits. Source: NVIDIA's data sheets."""


def peak(device: str, precision: str) -> float | None:
    """Operations in a second; None for a device that is not in the table.

    Args:
        device: its name.
        precision: "float32", "tf32", "mixed_float16" or "mixed_bfloat16".
    """
    # Whole words: an A10 is no A100, an L4 no L40S.
    words = f" {device.replace('-', ' ')} "
    for name, peak in PEAKS.items():
        if f" {name} " in words:
            known = {"float32": peak.float32, "tf32": peak.tf32}
            found = known.get(precision, peak.half)
            # The V100 and the T4 have no tensor cores for bfloat16.
            if precision == "mixed_bfloat16" and peak.tf32 is None:
                return None
            return None if found is None else found * 1e12
    return None
