"""device_checks: driver, torch and the device that a replica would use, and whether these fit together.

Owns: the rules: a driver runs any CUDA up to its own, and within one major version also newer ones; a binary for
sm_X.Y runs on X.Z with Z >= Y, and compute_XY on everything from X.Y on.
Does not: look (cluster.doctor.driver and cluster.doctor.torch_build do).
Invariants: no GPU is no fault unless the device is asked to be cuda.
"""

from __future__ import annotations

import re

from cluster.doctor.check import Check
from cluster.doctor.driver import Driver
from cluster.doctor.torch_build import TorchBuild, TorchDevice


def device_of(wanted: str, torch: TorchBuild) -> str:
    """What `--device` becomes: cpu or cuda."""
    return wanted if wanted != "auto" else ("cuda" if torch.devices else "cpu")


def device_checks(wanted: str, driver: Driver | None, torch: TorchBuild, cores: int) -> list[Check]:
    return [_driver(driver), _torch(driver, torch), _device(wanted, driver, torch, cores)]


def _driver(driver: Driver | None) -> Check:
    if driver is None:
        return Check("driver", "ok", "no nvidia-smi; a CPU needs none")
    if driver.error:
        return Check("driver", "warning", f"nvidia-smi: {driver.error}", "repair the driver, or use --device cpu")
    devices = ", ".join(driver.devices) or "no device"
    return Check("driver", "ok", f"{driver.version}, CUDA up to {_dotted(driver.cuda)}: {devices}")


def _torch(driver: Driver | None, torch: TorchBuild) -> Check:
    if torch.error:
        return Check("torch", "failed", f"does not import: {torch.error}", "run `make install` again")
    if torch.cuda is None:
        return Check("torch", "ok", f"{torch.version}, without CUDA")
    built = f"{torch.version}, built for CUDA {_dotted(torch.cuda)}"
    if driver is not None and driver.cuda is not None and torch.cuda[0] > driver.cuda[0]:
        advice = f"update the driver, or install a torch for CUDA {driver.cuda[0]}"
        return Check("torch", "warning", f"{built}; the driver supports up to {_dotted(driver.cuda)}", advice)
    for device in torch.devices:
        if not any(_runs(architecture, device) for architecture in torch.architectures):
            detail = f"{built}, has no code for {device.name} ({_dotted(device.capability)})"
            return Check("torch", "warning", detail, "install a torch built for this device, or use --device cpu")
    return Check("torch", "ok", built)


def _device(wanted: str, driver: Driver | None, torch: TorchBuild, cores: int) -> Check:
    if torch.devices and wanted != "cpu":
        found = [f"{device.name} (compute capability {_dotted(device.capability)})" for device in torch.devices]
        return Check("device", "ok", f"cuda: {', '.join(found)}")
    there = driver is not None and bool(driver.devices)
    advice = f"install a torch with CUDA{'' if there else ' and an NVIDIA driver'}" if torch.cuda is None else ""
    advice = advice or ("make the torch and driver checks pass" if there else "install an NVIDIA driver")
    if wanted == "cuda":
        return Check("device", "failed", "cuda is asked for, but torch finds no device", f"{advice}, or use another")
    cpu = f"cpu, {cores} {'core' if cores == 1 else 'cores'}"
    if there and wanted == "auto":
        return Check("device", "warning", f"{cpu}; torch cannot use the GPU", advice)
    return Check("device", "ok", cpu)


def _runs(architecture: str, device: TorchDevice) -> bool:
    """`architecture` is one of torch's, such as sm_90, sm_90a or compute_120."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    code = (int(match[2]), int(match[3]))
    if match[4] == "a":  # for exactly this device
        return code == device.capability
    if match[1] == "compute":
        return code <= device.capability
    return code[0] == device.capability[0] and code[1] <= device.capability[1]


def _dotted(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
