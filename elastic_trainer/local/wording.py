"""Numbers and the ends of processes in words. Pure."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def exit_text(exit_code: int) -> str:
    """How a process ended (its code as of :class:`subprocess.Popen`: negative for a signal)."""
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"exited with {exit_code}"
