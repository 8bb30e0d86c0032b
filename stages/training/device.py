"""The device of one worker and what it can do. Apart, because it is the only place that asks: everything else is told."""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from stages.contract import StageError
from stages.training.config import Precision

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10": 125.0}
"""Dense bfloat16 products of a GPU by a word of its name, as its data sheet says (H100 and H200: SXM boards)."""
UNTRIED = "training on a GPU was not exercised in this release: check the first results against a run on a CPU"


def of_this_worker() -> torch.device:
    """The GPU that the launcher gave to this process, or the processor."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it deterministic products are refused
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def untried(device: torch.device) -> str | None:
    """What a run on this device should say before anything else, because no test has been there."""
    return None if device.type == "cpu" else UNTRIED


def require(precision: Precision, device: torch.device) -> None:
    """StageError when the device has no such arithmetic."""
    if precision is Precision.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        name = torch.cuda.get_device_name(device)
        raise StageError(f"{name} does not multiply bfloat16 (compute capability 8.0 does); set precision=float32")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Products in `precision`; weights, and sums that need it, stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision is Precision.bfloat16)


def peak_flops(stated_tflops: float | None, device: torch.device, precision: Precision) -> float | None:
    """Operations a second that the device does at most: what the user states, else the data sheet's number of a known GPU;
    None for a processor, of which no sheet states one, and for float32 on a GPU."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    if device.type != "cuda" or precision is not Precision.bfloat16:
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in words), None)
