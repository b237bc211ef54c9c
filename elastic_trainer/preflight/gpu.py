"""Checks NVIDIA devices through the driver: uncorrected memory errors, and throttling.

*Runs in* the caller's thread, which waits for ``nvidia-smi`` until the deadline.
*Fails by* findings: skipped if ``nvidia-smi`` is missing.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from elastic_trainer.clock import Deadline
from elastic_trainer.preflight.child import BURIAL_S
from elastic_trainer.preflight.finding import Finding, Status

_TOOL = "nvidia-smi"
_FIELDS = "index,name,driver_version,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.active"
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""NVML's nvmlClocksThrottleReasons; idling, or running at the configured power cap, is no fault."""


def devices(deadline: Deadline, versions: dict[str, str]) -> list[Finding]:
    """One finding for each device; adds the driver's version to ``versions``."""
    tool = shutil.which(_TOOL)
    if tool is None:
        return [Finding("gpu", Status.SKIPPED, f"{_TOOL} is not installed")]
    call = [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    limit_s = deadline.remaining_s()
    try:
        code, out, complaint = _answer(call, limit_s)
    except subprocess.TimeoutExpired:
        hint = "the driver hangs: look at dmesg, restart the machine"
        return [Finding("gpu", Status.BAD, f"{_TOOL} gave no answer in {limit_s:.3g} s", hint=hint)]
    except OSError as error:
        return [Finding("gpu", Status.SKIPPED, f"{_TOOL} cannot be started: {error.strerror}")]
    if code:
        said = (out + complaint).strip().splitlines()
        return [Finding("gpu", Status.WARN, f"{_TOOL} fails: {said[0] if said else code}", hint="see dmesg")]
    return understood(out.splitlines(), versions)


def _answer(call: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """Exit code and outputs of ``call``. (subprocess.run would wait forever for a process that is stuck in the kernel,
    as nvidia-smi is when the driver hangs.)"""
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, complaint = process.communicate(timeout=limit_s)
    except BaseException:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(BURIAL_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        raise
    return process.returncode, out, complaint


def understood(lines: Iterable[str], versions: dict[str, str]) -> list[Finding]:
    """The findings from the output lines of nvidia-smi. Fields that a device lacks are ``[N/A]``."""
    found: list[Finding] = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5:
            continue
        index, model, driver, errors, reasons = cells
        versions["driver"] = driver
        found.append(_judged(f"gpu{index}", model, _number(errors), _number(reasons)))
    return found or [Finding("gpu", Status.SKIPPED, f"{_TOOL} lists no device")]


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def _judged(name: str, model: str, errors: int | None, reasons: int | None) -> Finding:
    if errors:
        hint = "drain this machine and reset or replace the device"
        return Finding(
            name, Status.BAD, f"{model}: {errors} uncorrected memory errors", float(errors), "errors", 0.0, hint
        )
    slowed = [text for bit, text in _SLOWED.items() if (reasons or 0) & bit]
    if slowed:
        hint = "check cooling and power"
        return Finding(name, Status.WARN, f"{model} is throttled: {', '.join(slowed)}", hint=hint)
    unknown = "" if errors is not None else ", memory errors are not counted"
    return Finding(name, Status.OK, f"{model}{unknown}", None if errors is None else 0.0, "errors", 0.0)
