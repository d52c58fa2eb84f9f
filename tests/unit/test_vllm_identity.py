"""Sessions and fingerprints: equal where they have to be, different everywhere else."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path

import pytest

from kvcellar.errors import Unsupported
from kvcellar.plugin.identity import (
    core_pid_of_worker,
    fingerprint_of,
    session_of,
    weight_files,
)


def _tell_session(answer: Connection) -> None:
    answer.send(session_of("id", core_pid_of_worker("mp")))


@pytest.mark.parametrize(
    "context", [multiprocessing.get_context("spawn"), multiprocessing.get_context("fork")]
)
def test_a_worker_computes_the_session_of_the_process_that_started_it(
    context: SpawnContext | ForkContext,
) -> None:
    mine, theirs = context.Pipe()
    process = context.Process(target=_tell_session, args=(theirs,))
    process.start()
    assert mine.recv() == session_of("id", os.getpid())
    process.join()


def test_a_worker_in_the_schedulers_process_computes_the_same_session() -> None:
    assert session_of("id", core_pid_of_worker("uni")) == session_of("id", os.getpid())


def test_a_session_is_32_hexadecimal_digits_of_id_process_and_start() -> None:
    session = session_of("id", os.getpid())
    assert len(session) == 32
    assert set(session) <= set("0123456789abcdef")
    assert session == session_of("id", os.getpid())
    assert session != session_of("other", os.getpid())
    assert session != session_of("id", os.getppid())


def test_a_pinned_id_gives_each_start_a_session_of_its_own() -> None:
    code = "import os; from kvcellar.plugin.identity import session_of; print(session_of('id', os.getpid()))"
    starts = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(starts) == 2


@pytest.mark.parametrize("executor", ["ray", "external_launcher", "SomeExecutor"])
def test_other_executors_are_refused_by_name(executor: str) -> None:
    with pytest.raises(Unsupported, match=executor):
        core_pid_of_worker(executor)


def test_a_fingerprint_depends_on_every_part_and_not_on_their_order() -> None:
    meaning = {"model": "m", "groups": [(0, 16, ("a", "b"))], "layout": "sharded", "revision": None}
    fingerprint = fingerprint_of(meaning)
    assert len(fingerprint) == 64
    assert fingerprint == fingerprint_of(dict(reversed(meaning.items())))
    for key in meaning:
        assert fingerprint_of(meaning | {key: "changed"}) != fingerprint


def test_weights_are_told_by_name_size_and_time(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12345")
    (tmp_path / "README.md").write_text("no weights")
    os.utime(weights, ns=(1, 2))
    assert weight_files(str(tmp_path)) == [("model.safetensors", 5, 2)]
    assert weight_files(str(weights)) == [("model.safetensors", 5, 2)]
    assert weight_files("org/name-on-a-hub") == []


def test_a_link_to_weights_that_are_gone_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert weight_files(str(tmp_path)) == []
