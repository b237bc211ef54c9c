"""Which commands a template may fork, and the reason for each that it may not."""

from __future__ import annotations

import pytest

from elastic_trainer.warm.template import Facts, PythonCommand, decide

ENVIRONMENT = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
FACTS = Facts("/bin/python", ("-u",), "/job", ENVIRONMENT, free=("FREE",))
FITTING = ["/bin/python", "-u", "train.py", "--lr", "1"]
FOUND = PythonCommand("/bin/python", ("-u",), False, "train.py", ("--lr", "1"))
OF_A_WORKER = {"RANK": "1", "MASTER_PORT": "2", "TORCHELASTIC_RUN_ID": "x", "ELASTIC_TRAINER_ROUND": "3", "FREE": "4"}


def test_a_script_or_module_fits_whatever_its_rank_is() -> None:
    """Ranks, rounds and ports differ between workers and between their lives; what follows ``-m`` is the module's."""
    assert decide(FITTING, ENVIRONMENT | OF_A_WORKER, "/job", FACTS) == FOUND
    words = ["/bin/python", "-u", "-m", "pkg.train", "-m", "x"]
    found = decide(words, ENVIRONMENT, "/job", FACTS)
    assert found == PythonCommand("/bin/python", ("-u",), True, "pkg.train", ("-m", "x"))
    unbuffered = Facts("/bin/python", (), "/job", {"PYTHONUNBUFFERED": "1"})
    assert decide(FITTING, {"PYTHONUNBUFFERED": "1"}, "/job", unbuffered) == FOUND


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
    found = decide(words, ENVIRONMENT, "/job", FACTS)
    assert isinstance(found, str)
    assert reason in found


def test_what_imported_modules_may_have_read_must_be_the_same() -> None:
    """The directory and all variables, set, changed or missing; of a worker's those that the template has."""
    assert decide(FITTING, ENVIRONMENT, "/other", FACTS) == "the working directory is /other, not /job"
    more = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2"}
    for environment, names in ((ENVIRONMENT | more, ", ".join(more)), ({"PATH": "/bin"}, "OMP_NUM_THREADS")):
        assert decide(FITTING, environment, "/job", FACTS) == f"the environment differs in {names}"
    name = "ELASTIC_TRAINER_LEDGER_DIR"
    facts = Facts("/bin/python", ("-u",), "/job", {name: "/a"})
    assert decide(FITTING, {name: "/a"}, "/job", facts) == FOUND
    assert decide(FITTING, {name: "/b"}, "/job", facts) == f"the environment differs in {name}"


def test_an_agent_may_lead_its_workers_to_other_caches() -> None:
    """Than the template inherited: torch sets one where a process imports torch._dynamo."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    assert decide(FITTING, {name: "/b"}, "/job", Facts("/bin/python", ("-u",), "/job", {name: "/a"})) == FOUND
