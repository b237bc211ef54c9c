"""Programs that a template forks behave as those that an interpreter starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local import agents
from elastic_trainer.local.processes import alive
from elastic_trainer.warm.starting import Adopted, ColdStart, Starter, StartRequest
from elastic_trainer.warm.template import CACHES, COMPILERS
from tests.support.requirements import needs
from tests.support.waiting import eventually

LOOK = Path(__file__).parent / "look.py"
LIMIT_S = 60.0
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_", *CACHES))}


@contextmanager
def starter(*modules: str, learn: bool = False, **environment: str) -> Iterator[Starter]:
    it = Starter(modules, ["-u"], BARE | environment, learn=learn)
    try:
        yield it
    finally:
        it.close()


class Runner:
    def __init__(self, directory: Path) -> None:
        self.out, self.err = directory / "out", directory / "err"
        self.more: dict[str, str] = {}

    def warm(self, it: Starter, *words: str) -> Adopted:
        with self.out.open("w") as out, self.err.open("w") as err:
            environment = BARE | {"RANK": "1"} | self.more
            return it.start(StartRequest([sys.executable, "-u", *words], environment, 0, out.fileno(), err.fileno()))

    def cold(self, *words: str) -> subprocess.Popen[bytes]:
        with self.out.open("w") as out, self.err.open("w") as err:
            return subprocess.Popen(
                [sys.executable, "-u", *words], env=BARE | {"RANK": "1"} | self.more,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def result(self, process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
        return process.wait(LIMIT_S), self.out.read_text(), self.err.read_text()

    def of(self, it: Starter, script: Path, *words: str) -> tuple[int, str, str]:
        return self.result(self.warm(it, str(script), *words))


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def script(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("words", [[str(LOOK), "a b", "-x"], ["-m", "tests.integration.warm.look", "y"]])
def test_a_fork_sees_of_itself_what_a_fresh_process_sees(runner: Runner, words: list[str]) -> None:
    """Arguments, path, ``__main__``, environment and command in /proc, signals, session, limits, streams, parent."""
    code, wanted, _ = runner.result(runner.cold(*words))
    assert code == 0
    with starter("json", learn=True) as it:
        code, seen, error = runner.result(runner.warm(it, *words))
    assert (code, error) == (0, "")
    assert json.loads(seen) == json.loads(wanted)
    assert json.loads(seen)["parent"] == os.getpid()


ENDS = {
    "success": "print('done')",
    "code": "import sys; sys.exit(3)",
    "sentence": "import sys; sys.exit('no luck')",
    "exception": "def f():\n    raise ValueError('x')\nf()",
    "syntax": "def f(:\n    pass",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "import os; os.abort()",
    "interrupt": "raise KeyboardInterrupt",
    "atexit": "import atexit\nx = 5\natexit.register(lambda: print(x))\nprint('first')",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hooked', a[0])\n1 / 0",
    "mistake": "from elastic_trainer.errors import StorageError\nfrom elastic_trainer.telemetry import logs\n"
    "logs.install_hook()\nraise StorageError('full')",
    "last": "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n1 / 0",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    "spawn": "import multiprocessing\n\ndef f(x):\n    return x * x\n\n"
    "if __name__ == '__main__':\n"
    "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(f, [3]))",
}


def test_a_fork_ends_as_a_fresh_process_ends(tmp_path: Path, runner: Runner) -> None:
    """Exit codes, signals, tracebacks, atexit, threads waited for, pickles of ``__main__`` in spawned children."""
    with starter("json") as it:
        for name, text in ENDS.items():
            path = script(tmp_path, text, f"ends_with_{name}.py")
            assert runner.of(it, path) == runner.result(runner.cold(str(path))), name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENDS["exception"], "ValueError: x"),
        (ENDS["sentence"], "no luck"),
        (ENDS["mistake"], "StorageError: full"),
        (ENDS["code"], None),
        ("import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('mine')\nraise ValueError('x')", "mine"),
        ("class E(Exception):\n  def __str__(self): return 1 / 0\nraise E", None),
        ("import resource as r\nr.setrlimit(r.RLIMIT_FSIZE, (64, 64))\nraise ValueError('a full disk')", None),
        ("import os\nif os.fork() == 0: raise ValueError('of a child')\nos.wait()", None),
    ],
)
def test_a_fork_leaves_its_exception_to_torchrun(tmp_path: Path, runner: Runner, text: str, said: str | None) -> None:
    """In the form of torch's @record, whose own is not overwritten; torch reads it."""
    error = tmp_path / "error.json"
    runner.more = {"TORCHELASTIC_ERROR_FILE": str(error)}
    with starter(learn=False) as it:
        code = runner.of(it, script(tmp_path, text))[0]
    if said is None:
        assert not error.exists()
    elif said == "mine":
        assert error.read_text() == "mine"
    else:
        message = ProcessFailure(0, 1, code, str(error)).error_file_data["message"]
        trace = message["extraInfo"].get("py_callstack", "")
        assert message["message"] == said
        assert ("line 2, in f" in trace) == ("Traceback" in trace) == (text == ENDS["exception"])
        assert "warm/template.py" not in trace


def test_forks_draw_different_random_numbers_unless_they_seed(tmp_path: Path, runner: Runner) -> None:
    """The generators of Python, numpy and torch begin anew in each."""
    text = (
        "import random, numpy, torch\nprint(random.random())\nprint(numpy.random.rand())\n"
        "print(torch.initial_seed(), torch.rand(1).item())\n"
        "random.seed(1); numpy.random.seed(1); torch.manual_seed(1)\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1))"
    )
    path = script(tmp_path, text)
    with starter("torch", "numpy") as it:
        one, other = (runner.of(it, path)[1].splitlines() for _ in range(2))
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, False, False, True]


def test_the_script_is_read_at_each_start(tmp_path: Path, runner: Runner) -> None:
    """A script, and a module beside it, that have changed run as they are now. Variables that a preloaded module sets
    are set in a fork, and one that it removes is gone; those of the worker are its own."""
    script(tmp_path, "import os; os.environ['SET'] = 'x'; os.environ.pop('GONE')", "sets.py")
    runner.more = {"PYTHONPATH": str(tmp_path), "GONE": "1"}
    with starter("sets", learn=True, PYTHONPATH=str(tmp_path), GONE="1") as it:
        for value in (1, 22):
            script(tmp_path, f"x = {value}", "beside.py")
            shown = f"{value}, beside.x, [os.environ.get(name) for name in ('SET', 'GONE', 'RANK')]"
            path = script(tmp_path, f"import beside, os\nprint({shown})")
            assert runner.of(it, path)[1] == f"{value} {value} ['x', None, '1']\n"


def test_a_file_that_hides_a_module_starts_cold(tmp_path: Path, runner: Runner) -> None:
    """The template has the library's module, the script would import its own."""
    path = script(tmp_path, "import json")
    script(tmp_path, "", "json.py")
    with starter("json") as it, pytest.raises(ColdStart, match=r"json\.py shadows a module"):
        runner.warm(it, str(path))


def test_a_thread_that_a_fork_can_do_without_spoils_no_template(tmp_path: Path, runner: Runner) -> None:
    """As that of jemalloc, which pyarrow starts; the fork has only its own."""
    text = (
        "import ctypes, threading\n"
        "def named(begun, end):\n"
        "    ctypes.CDLL(None).prctl(15, b'jemalloc_bg_thd')\n    begun.set()\n    end.wait(99)\n"
        "begun = threading.Event()\n"
        "threading.Thread(target=named, args=(begun, threading.Event()), daemon=True).start()\nbegun.wait()"
    )
    script(tmp_path, text, "allocating.py")
    path = script(tmp_path, "import os, sys; print('allocating' in sys.modules, len(os.listdir('/proc/self/task')))")
    runner.more = {"PYTHONPATH": str(tmp_path)}
    with starter("allocating", PYTHONPATH=str(tmp_path)) as it:
        assert runner.of(it, path)[:2] == (0, "True 1\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; x = os.environ.get('LOCAL_RANK', '0')", "importing odd reads LOCAL_RANK"),
        ("import threading as t; t.Thread(target=t.Event().wait, args=(99,), daemon=True).start()", "starts a thread"),
        ("f = open(__file__)", "leaves open"),
        ("import random; random.seed(1)", "uses random numbers"),
        ("import numpy; numpy.random.seed(1)", "uses random numbers"),
        ("import os; os.chdir('/')", "changes the working directory"),
        ("import subprocess; p = subprocess.Popen(['sleep', '5'])", "starts a process"),
    ],
)  # fmt: skip
def test_a_module_that_a_fork_cannot_share_is_left_out(tmp_path: Path, runner: Runner, text: str, reason: str) -> None:
    """The start says why and is cold; the next template is made without it, and forks."""
    script(tmp_path, "import numpy.random\n" if "numpy" in text else "", "before.py")
    script(tmp_path, text, "odd.py")
    path = script(tmp_path, "import odd, sys; print('ran', 'json' in sys.modules)")
    runner.more = {"PYTHONPATH": str(tmp_path)}
    with starter("before", "odd", "json", PYTHONPATH=str(tmp_path)) as it:
        with pytest.raises(ColdStart, match=reason):
            runner.warm(it, str(path))
        assert runner.of(it, path)[:2] == (0, "ran True\n")


def test_what_nodes_of_a_local_cluster_import_can_be_preloaded(tmp_path: Path, runner: Runner) -> None:
    """All of it: the first node is forked already."""
    path = script(tmp_path, f"import sys; print([each for each in {agents.MODULES} if each not in sys.modules])")
    with starter(*agents.MODULES) as it:
        assert runner.of(it, path)[:2] == (0, "[]\n")


@pytest.mark.parametrize("chosen", ["/mine", None])
def test_a_fork_keeps_the_caches_that_its_agent_has_chosen(tmp_path: Path, runner: Runner, chosen: str | None) -> None:
    """Importing torch._dynamo sets a default in the template."""
    shown = "'torch._dynamo' in sys.modules, os.environ.get('TORCHINDUCTOR_CACHE_DIR')"
    path = script(tmp_path, f"import os, sys; print({shown})")
    runner.more = {"TORCHINDUCTOR_CACHE_DIR": chosen} if chosen else {}
    with starter("torch", "torch._dynamo") as it:
        assert runner.of(it, path)[:2] == (0, f"True {chosen}\n")


def test_a_template_learns_what_its_programs_import(tmp_path: Path, runner: Runner) -> None:
    """Installed modules alone: the next program finds them, and imports its own code itself."""
    script(tmp_path, "", "mine.py")
    path = script(tmp_path, "import sys\nprint('sqlite3.dump' in sys.modules, 'mine' in sys.modules)\n"
                            "import mine, sqlite3.dump, zipapp, wave")  # fmt: skip
    with starter(learn=True) as it:
        assert runner.of(it, path)[1] == "False False\n"
        deadline = Deadline.after(LIMIT_S)
        while (said := runner.of(it, path)[1]) == "False False\n" and not deadline.expired:
            pause(1.0)
    assert said == "True False\n"


def test_the_children_of_a_fork_have_nothing_of_its_template(tmp_path: Path, runner: Runner) -> None:
    """No socket of the template's is open in them, and their imports are their own."""
    shows = "print([n for n in os.listdir('/proc/self/fd') if int(n) > 2])"
    path = script(tmp_path, f"import os\nif os.fork() == 0:\n    import wave\n    {shows}\nelse:\n    os.wait()")
    with starter(learn=True) as it:
        assert runner.of(it, path) == runner.result(runner.cold(str(path)))


def test_a_template_that_is_killed_is_replaced(runner: Runner) -> None:
    """The start after it is cold, with the reason; the next one is warm again."""
    others = set(templates())  # that of this process's clusters
    with starter() as it:
        eventually(lambda: set(templates()) - others, "there is no template")
        before = set(templates()) - others
        next(iter(before)).kill()
        with pytest.raises(ColdStart, match=r"the template has ended"):
            runner.warm(it, str(LOOK))
        assert runner.of(it, LOOK)[0] == 0
        assert not set(templates()) & before
    assert set(templates()) <= others


def templates() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "template of processes" in " ".join(each.cmdline())]


OWNER = """
import os, sys, time
from elastic_trainer.warm.starting import Starter, StartRequest
it = Starter((), ["-u"], dict(os.environ), learn=False)
child = it.start(StartRequest([sys.executable, "-u", sys.argv[1]], dict(os.environ), 0, 1, 2))
print(child.pid, it._process.pid, flush=True)
time.sleep(60)
"""


def test_a_template_dies_with_its_owner(tmp_path: Path) -> None:
    """A killed owner leaves no template; its programs go on, as those of a killed torchrun do."""
    path = script(tmp_path, "import time; time.sleep(60)")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True, env=BARE)
    assert owner.stdout is not None
    program, template = (psutil.Process(int(each)) for each in owner.stdout.readline().split())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    eventually(lambda: not alive(template), "the template lives on")
    assert alive(program)
    program.kill()


def test_the_end_of_a_process_that_loaded_torch_says_nothing() -> None:
    """Garbage that is not collected at its end, which would take a second, is none of which a library complains."""
    program = "import atexit, torch._dynamo\nfrom elastic_trainer.warm.template import skip_last_collection\n"
    command = [sys.executable, "-c", f"{program}atexit.register(skip_last_collection)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_compiles_at_once_where_others_of_the_run_have_compiled(tmp_path: Path, runner: Runner) -> None:
    """The template has imported Inductor and asked compiler and processor; it is as fit to fork as before. One whose
    modules the user has named imports no others."""
    needs("g++", "compiles kernels for the CPU")
    path = script(
        tmp_path,
        "import sys, threading\nfrom torch._inductor import codecache, cpu_vec_isa\n"
        "asked = cpu_vec_isa.valid_vec_isa_list, codecache._precompile_header\n"
        "kernels = [each for each in sys.modules if '.compile_tasks.' in each]\n"
        "print(*[each.cache_info().currsize for each in asked], threading.active_count(), kernels)",
    )
    runner.more = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for learn, said in ((True, "1 1 1 []\n"), (False, "0 0 1 []\n")):
        with starter("torch", learn=learn, **runner.more) as it:
            assert it.await_imports(2 * LIMIT_S, COMPILERS)
            assert runner.of(it, path) == (0, said, "")
