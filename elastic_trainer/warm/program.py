"""Runs a script or module in a forked process as ``python`` would run it.

*Runs in* a fork of the template, its main thread, near the bottom of the stack.
*Owns* ``__main__``, ``sys.argv`` and the first entry of ``sys.path``.
*Fails by* exiting as the interpreter would: it prints the program's exception without the frames of this module, and
leaves SystemExit and KeyboardInterrupt to the interpreter.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from elastic_trainer.warm.fitness import PythonCommand


def first_entry(command: PythonCommand) -> str:
    """What Python puts first in ``sys.path``: the script's directory, or for a module the working directory."""
    return os.getcwd() if command.module else os.path.dirname(os.path.realpath(command.target))


def run(command: PythonCommand, words: list[str], installed: str) -> None:
    """Run ``command`` as ``__main__``; its entry is inserted in ``sys.path`` before ``installed``."""
    main: Any = ModuleType("__main__")
    main.__builtins__ = builtins
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.argv = ["-m" if command.module else command.target, *command.arguments]
    sys.orig_argv = words
    if not sys.flags.safe_path:
        sys.path.insert(sys.path.index(installed) if installed in sys.path else 0, first_entry(command))
    importlib.invalidate_caches()
    try:
        if command.module:
            if not hasattr(sys.modules.get(command.target), "__path__"):
                sys.modules.pop(command.target, None)  # a preloaded module would exist twice
            runner: Any = runpy
            runner._run_module_as_main(command.target)
        else:
            path = os.path.abspath(command.target)
            main.__file__, main.__cached__, main.__loader__ = path, None, SourceFileLoader("__main__", path)
            with io.open_code(path) as file:
                source = file.read()
            exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _report(error)
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None  # so that the interpreter ends by SIGINT, as its caller expects
    except BaseException as error:  # noqa: BLE001 - the outermost frame of a program
        _report(error)
        raise SystemExit(1) from None


def _report(error: BaseException) -> None:
    """Print it as the interpreter would, without this module's frame."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)
