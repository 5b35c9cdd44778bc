"""Which rank is gone; tests/ranks has ranks that really are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch.distributed as dist

from vestige.errors import PrivacyError
from vestige.parallel import faults
from vestige.parallel.faults import gone, is_alive, is_of_messages


def test_a_process_that_has_ended_is_not_alive():
    assert is_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    while child.poll() is None and is_alive(child.pid):
        pass
    assert not is_alive(child.pid)
    child.wait()
    assert not is_alive(child.pid)


def test_ranks_that_have_ended_are_named():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    here = socket.gethostname()
    told = gone([(here, os.getpid()), (here, child.pid), ("elsewhere", child.pid)])
    assert told == f"rank 1 (process {child.pid} on {here}) has ended."


def test_ranks_of_other_machines_cannot_be_looked_at(monkeypatch):
    monkeypatch.setattr(faults, "_PATIENCE", 0.2)
    here = (socket.gethostname(), os.getpid())
    assert gone([here, ("b", 1), ("a", 1)]) == "a rank on a or b does not answer."
    assert gone([]) == "a rank on this machine does not answer."  # not known yet


def test_ranks_that_all_run_have_said_different_things(monkeypatch):
    monkeypatch.setattr(faults, "_PATIENCE", 0.2)
    here = (socket.gethostname(), os.getpid())
    told = gone([here, here])
    assert "every rank still runs" in told and "the same calls in the same order" in told


def test_errors_of_messages_are_told_from_others():
    assert is_of_messages(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed"))
    assert is_of_messages(dist.DistBackendError("NCCL error"))
    assert not is_of_messages(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_of_messages(PrivacyError("told already, of gloo"))
