"""Which commands a template may fork, and the reason for each that it may not."""

from __future__ import annotations

import pytest

from elastic_trainer.warm.template import Facts, PythonCommand, StartDecision, decide

FACTS = Facts("/bin/python", ("-u",), "/job", {"PATH": "/bin", "OMP_NUM_THREADS": "1"}, free=("FREE",))
FITTING = ["/bin/python", "-u", "train.py", "--lr", "1"]


def decided(words: list[str] = FITTING, directory: str = "/job", **more: str) -> StartDecision:
    return decide(words, {**FACTS.environment, **more}, directory, FACTS)


def test_a_script_fits_whatever_its_rank_is() -> None:
    """Ranks, rounds and ports differ between workers and between their lives, and are no reason."""
    found = decided(RANK="1", MASTER_PORT="2", TORCHELASTIC_RUN_ID="x", ELASTIC_TRAINER_ROUND="3", FREE="4")
    assert found.command == PythonCommand("/bin/python", ("-u",), False, "train.py", ("--lr", "1"))


def test_a_module_fits() -> None:
    """``-m`` names a module; what follows is its own."""
    found = decided(["/bin/python", "-u", "-m", "pkg.train", "-m", "x"])
    assert found.command == PythonCommand("/bin/python", ("-u",), True, "pkg.train", ("-m", "x"))


def test_a_variable_does_as_well_as_the_option_for_unbuffered_output() -> None:
    """PYTHONUNBUFFERED is -u."""
    facts = Facts("/bin/python", (), "/job", {"PYTHONUNBUFFERED": "1"})
    assert decide(FITTING, {"PYTHONUNBUFFERED": "1"}, "/job", facts).command is not None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "not one of /bin/python"),
        (["numactl", "--cpunodebind=0", *FITTING], "not one of /bin/python"),
        (["/bin/other", "-u", "train.py"], "not one of /bin/python"),
        (["/bin/python", "train.py"], "buffered differently"),
        (["/bin/python", "-u"], "neither a script nor a module"),
        (["/bin/python", "-u", "-m"], "neither a script nor a module"),
        (["/bin/python", "-u", "-O", "train.py"], "neither a script nor a module"),
        (["/bin/python", "-u", "-c", "print(1)"], "neither a script nor a module"),
    ],
)
def test_another_command_starts_cold(words: list[str], reason: str) -> None:
    """Another interpreter, a binding to cores, other options."""
    found = decided(words)
    assert found.command is None
    assert reason in found.reason


def test_what_imported_modules_may_have_read_must_be_the_same() -> None:
    """The directory and all other variables, set, changed or missing."""
    assert decided(directory="/other").reason == "the working directory is /other, not /job"
    found = decided(CUDA_VISIBLE_DEVICES="1", OMP_NUM_THREADS="2")
    assert found.reason == "the environment differs in CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS"
    assert decide(FITTING, {"PATH": "/bin"}, "/job", FACTS).reason == "the environment differs in OMP_NUM_THREADS"


def test_a_workers_variable_that_the_template_has_must_be_the_same() -> None:
    """Its modules may have read it."""
    facts = Facts("/bin/python", ("-u",), "/job", {"ELASTIC_TRAINER_LEDGER_DIR": "/a"})
    assert decide(FITTING, {"ELASTIC_TRAINER_LEDGER_DIR": "/a"}, "/job", facts).command is not None
    assert decide(FITTING, {"ELASTIC_TRAINER_LEDGER_DIR": "/b"}, "/job", facts).command is None
