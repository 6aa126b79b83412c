"""read_torch: which torch is installed, for which CUDA it was built, and which devices it can use.

Owns: importing torch for this, and the error when that fails.
Does not: judge (cluster.doctor.device).
Invariants: a torch that is missing or broken is an answer, not an exception.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchDevice:
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    version: str = ""
    cuda: tuple[int, int] | None = None  # None: a build without CUDA
    architectures: tuple[str, ...] = ()  # such as sm_90 (binaries) and compute_90 (code for this and newer devices)
    devices: tuple[TorchDevice, ...] = ()
    error: str = ""  # why torch cannot be imported


def read_torch() -> TorchBuild:
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchBuild(error=str(error).partition("\n")[0])
    if torch.version.cuda is None:
        return TorchBuild(version=torch.__version__)
    major, minor = torch.version.cuda.split(".")[:2]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchBuild(
        version=torch.__version__,
        cuda=(int(major), int(minor)),
        architectures=tuple(torch.cuda.get_arch_list()),
        devices=tuple(
            TorchDevice(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)
        ),
    )
