"""A small training job in place: ``job.py SCENARIO``, a JSON object. It fails where the scenario says, once.

``faults``: ``{"node", "step", "where", "what"}``. Where: ``drawn``, ``forward``, ``before_update``, ``inside_update``,
``after_update`` (still in the step's body), ``after_step`` or, at step 0, ``settling`` (before a last save). What:
``lose`` (as if a collective had lost a peer), ``memory`` (there is none), ``kill``, ``error:TEXT`` (the script's own),
``raw`` (collectives of the script's own, of torch's), ``barrier`` (the session's, on all nodes), ``gate:NAME`` (waits
until the file NAME.open is there), ``planned`` (waits until this worker has heard of a planned change).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_trainer import Session
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.clock import pause
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.state import restore
from tests.unit.worker.toys import Counter, data, loss_of, model

LOST = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"


class Scenario:
    def __init__(self, text: str) -> None:
        self.values: dict[str, Any] = {"size": 16, "optimizer": "adamw", "pace_s": 0.0, **json.loads(text)}
        self.node = os.environ["ELASTIC_TRAINER_NODE"]
        self.faults = [each for each in self.values.get("faults", ()) if each["node"] in (self.node, "all")]

    def at(self, step: int, where: str, session: Session) -> None:
        for fault in list(self.faults):
            if (fault["step"], fault["where"]) == (step, where):
                self.faults.remove(fault)
                strike(fault["what"], session)


def strike(what: str, session: Session) -> None:
    if what == "lose":
        raise RuntimeError(LOST)
    if what == "memory":
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    if what.startswith("error:"):
        raise RuntimeError(what.removeprefix("error:"))
    if what == "raw":
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "barrier":
        session.barrier()
    if what == "planned":
        recovery: Any = session._trained.recovery
        while not recovery.knows_change():
            pause(0.01)
    if what.startswith("gate:"):
        name = what.removeprefix("gate:")
        Path(f"{name}.{os.environ['ELASTIC_TRAINER_NODE']}").touch()
        while not Path(f"{name}.open").exists():
            pause(0.01)


def dying_source(after: int) -> None:
    """Die behind one of the pieces of a healing state."""
    send, sent = Control.send, [0]

    def counted(self: Control, tensor: torch.Tensor, target: int) -> None:
        send(self, tensor, target)
        sent[0] += 1
        if sent[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)

    Control.send = counted  # type: ignore[method-assign]


class Neighbours:
    """Connections of the script's own, whose ends are both here. A thread opens them again and again until torch's
    process group is there, and then some more."""

    KEPT, MORE = 60, 5

    def __init__(self) -> None:
        self._pairs: deque[tuple[socket.socket, ...]] = deque()
        self._thread = threading.Thread(target=self._open, daemon=True)
        self._thread.start()

    def _open(self) -> None:
        more = 0
        while more < self.MORE:
            more += dist.is_initialized()
            listener = socket.create_server(("127.0.0.1", 0))
            self._pairs.append((listener, socket.create_connection(listener.getsockname()), listener.accept()[0]))
            if len(self._pairs) > self.KEPT:
                for each in self._pairs.popleft():
                    each.close()

    def broken(self) -> int:
        """How many ends do not work any more."""
        self._thread.join(30.0)
        assert len(self._pairs) == self.KEPT
        return sum(map(shut, (end for _, *ends in self._pairs for end in ends)))


def shut(end: socket.socket) -> bool:
    """Whether it was shut for reading: it says so as long as nothing has come."""
    try:
        return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def main(scenario: Scenario) -> None:
    torch.set_num_threads(1)
    values = scenario.values
    counter, seen, losses = Counter(), [], []
    options: dict[str, Any] = {"checkpoint_every_steps": values.get("save_every"), "checkpoint_every_s": None}
    options["allow_changed"] = values.get("allow_changed", ())
    with Session(values.get("checkpoints"), seed=3, device="cpu", **options) as session:
        torch.manual_seed(sum(map(ord, scenario.node)))  # nodes begin differently, and are made alike
        module = model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=3) if values.get("scaled") else None
        session.register("counter", counter)
        if values.get("small_pieces"):
            restore.CHUNK = 512
        if values.get("dies_after_pieces"):
            dying_source(values["dies_after_pieces"])
        neighbours = Neighbours() if values.get("neighbours") else None
        wrapped = session.wrap(module, optimizer=optimizer, scheduler=scheduler, scaler=scaler)

        def spoil(*_: Any) -> None:
            if any(each["where"] == "inside_update" for each in scenario.faults):
                before = [p.detach().clone() for p in module.parameters()]
                with torch.no_grad():
                    next(iter(module.parameters())).add_(1.0)
                scenario.at(session.step_number + 1, "inside_update", session)
                with torch.no_grad():
                    for parameter, value in zip(module.parameters(), before, strict=True):
                        parameter.copy_(value)

        saver: Any = session._trained.saver
        settle = saver.make_durable

        def settles() -> Exception | None:
            scenario.at(0, "settling", session)
            return settle()  # type: ignore[no-any-return]

        saver.make_durable = settles
        optimizer.register_step_pre_hook(spoil)
        for batch in session.batches(data(), global_batch_size=values["size"], epochs=2):
            number = session.step_number + 1
            scenario.at(number, "drawn", session)
            if values.get("barrier"):
                session.barrier()
            with session.step() as step:
                scenario.at(number, "forward", session)
                loss = loss_of(wrapped, batch)
                step.backward(loss)
                step.clip(5.0)
                scenario.at(number, "before_update", session)
                optimizer.step()
                scenario.at(number, "after_update", session)
            seen.append(session.step_number)
            if step.committed:
                if values.get("losses"):
                    losses.append(step.loss)
                counter.values.append(session.step_number)
            scenario.at(number, "after_step", session)
            if values["pace_s"]:
                pause(values["pace_s"])
        committed = session._trained.state.committed()
    result = {
        "pid": os.getpid(),
        "state": f"{fingerprint(committed):016x}",
        "buffers": f"{fingerprint(dict(module.named_buffers())):016x}",
        "step": session.step_number,
        "counter": counter.values,
        "seen": seen,
        "losses": losses,
        "broken": neighbours.broken() if neighbours is not None else 0,
        "resumed_from": session.resumed_from,
    }
    Path(f"{scenario.node}.result").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Scenario(sys.argv[1]))
