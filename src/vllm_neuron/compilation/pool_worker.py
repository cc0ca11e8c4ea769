"""A process of a `pool`: takes jobs from one pipe, one after the other, and answers on another.

Started as ``python -m vllm_neuron.compilation.pool_worker JOBS ANSWERS``, the numbers of two open file descriptors, as
the leader of a session of its own. What it and the compilers it starts print goes to the log file of the job at hand.
"""

import faulthandler
import logging
import os
import pickle
import select
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def send(connection: Connection, message: object) -> None:
    """One length-prefixed pickle.

    Not `Connection.send`: once torch is imported that hands over tensors as references into shared memory, which only
    relatives of a process can follow.
    """
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """What `send` was given at the other end; EOFError if that is gone."""
    return pickle.loads(connection.recv_bytes())


def serve(jobs: Connection, answers: Connection) -> None:
    """Answer jobs until the other end is gone. The first message is the module search path of the process there.

    To a job there are two answers: ("started", None) when its modules are imported, so that its time begins; and
    ("done", result), or ("raised", (its first line, size of the log without the traceback)).
    """
    sys.path[:] = receive(jobs)
    while True:
        log, job = receive(jobs)
        _print_to(log)
        answers.send_bytes(_answer(job, answers))


def _answer(job: bytes, answers: Connection) -> bytes:
    """Run one job; what the pool is told of it, pickled."""
    try:
        function, argument = pickle.loads(job)
        send(answers, ("started", None))
        return pickle.dumps(("done", function(argument)))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        printed = os.fstat(1).st_size
        traceback.print_exc()
        return pickle.dumps(("raised", (reason, printed)))


def _print_to(log: str) -> None:
    """Let this process and those it starts print to a file from now on."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _fork_guard(jobs: Connection, answers: Connection) -> int:
    """Start a process that ends the whole session, compilers included, once the pool's process or this one is gone.

    A process, because a thread could not act while a compiler holds Python's lock.
    """
    of_worker, in_worker = os.pipe()
    guard = os.fork()
    if guard:
        os.close(of_worker)
        return guard
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Nobody must take the guard for the worker: neither who waits for an answer, nor the guard itself.
    answers.close()
    os.close(in_worker)
    hangup = select.poll()
    for descriptor in (jobs.fileno(), of_worker):
        hangup.register(descriptor, 0)
    hangup.poll()
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def main(jobs_fd: int, answers_fd: int) -> None:
    """Serve the pool that has started this process."""
    for descriptor in (jobs_fd, answers_fd):
        os.set_inheritable(descriptor, False)
    jobs, answers = Connection(jobs_fd, writable=False), Connection(answers_fd, readable=False)
    guard = _fork_guard(jobs, answers)
    # A job that is stopped gets the chance to remove its temporary files.
    signal.signal(signal.SIGTERM, _exit)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s [%(name)s] %(message)s")
    try:
        with suppress(EOFError, BrokenPipeError):
            serve(jobs, answers)
    finally:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
