"""The sidecar as a process, and the commands beside it: what they show, and how they end."""

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar import cli
from kvcellar.region import locks
from kvcellar.region.frame import META_BYTES
from kvcellar.region.metadata import Counters
from tests.integration.conftest import MakeSidecar, MakeVolume
from tests.support.sidecars import KVCELLAR, Sidecar, attach, until
from tests.support.volumes import used_bytes

pytestmark = pytest.mark.integration

MIB = 2**20
ENGINE = '{engine_id="eng"}'


# --- the normal life ----------------------------------------------------------------------------------


def test_a_region_is_made_settled_and_shown_as_it_lies_on_the_volume(
    make_sidecar: MakeSidecar, volume: Path
) -> None:
    sidecar = make_sidecar(KVCELLAR_CAPACITY="65Mi").start()
    waited = sidecar.run("wait", "--for", "settled", "--timeout", "20")
    assert (waited.returncode, waited.stdout, waited.stderr) == (0, "", "")

    region = sidecar.region()
    disk_usage = int(subprocess.check_output(["du", "-B1", sidecar.data_file()]).split()[0])
    assert region["capacityBytes"] == 64 * MIB  # floored to 2 MiB
    assert region["reservedBytes"] == region["settledBytes"] == disk_usage == 64 * MIB
    assert used_bytes(volume) == 64 * MIB + META_BYTES
    metrics = sidecar.metrics()
    assert metrics[f"kvcellar_region_resident_bytes{ENGINE}"] == disk_usage
    assert metrics[f"kvcellar_region_settle_ratio{ENGINE}"] == 1
    until(
        lambda: sidecar.metrics()["kvcellar_tmpfs_free_bytes"] == 192 * MIB - META_BYTES,
        "the free bytes of the tmpfs to be read again",
    )

    for path in ("/livez", "/startupz", "/readyz"):
        assert sidecar.get(path) == (200, "ok\n")
    plan = json.loads(sidecar.get("/v1/plan")[1])
    assert plan["fits"] is True
    assert 64 * MIB <= plan["askedBytes"] <= 65 * MIB
    shown = json.loads(sidecar.run("status", "--json").stdout)["regions"][0]
    region = sidecar.region()
    # What the node has in use changes between two looks.
    assert [one.pop("usageBytes") for one in shown["limits"]][:1] == [used_bytes(volume)]
    assert [one.pop("usageBytes") for one in region["limits"]][:1] == [used_bytes(volume)]
    assert shown == region
    for name in ("sidecar starts", "region made", "region reserved", "region ready"):
        assert len(sidecar.events(name)) == 1
    assert sidecar.complaint == ""


def test_an_engine_is_shown_while_it_is_attached_and_its_counters_stay(
    make_sidecar: MakeSidecar,
) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    for n, session in enumerate(["ab" * 16, "cd" * 16], start=1):
        engine = attach(sidecar.directory, session)
        engine.report(Counters(store_bytes=100), pinned=True)
        until(lambda: sidecar.region()["participants"], "a participant")
        region = sidecar.region()
        assert [p["role"] for p in region["participants"]] == ["worker"]
        assert (region["generation"], region["engineStarts"]) == (n, n)
        assert region["geometry"]["numChunks"] == 32 * MIB // 4096
        engine.close()
        until(lambda: sidecar.region()["participants"] == [], "nobody attached")
    moved = 'kvcellar_transfer_bytes_total{direction="store",engine_id="eng"}'
    assert sidecar.metrics()[moved] == 200


def test_the_sidecar_is_small_and_imports_neither_numpy_nor_torch(
    make_sidecar: MakeSidecar,
) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    for _ in range(200):
        for path in ("/metrics", "/v1/regions", "/"):
            assert sidecar.get(path)[0] == 200
    status = Path(f"/proc/{sidecar.process.pid}/status").read_text()
    rss_anon_kib = int(status.split("RssAnon:")[1].split()[0])
    assert rss_anon_kib < 45 * 1024
    assert "numpy" not in Path(f"/proc/{sidecar.process.pid}/maps").read_text()
    program = "import sys, kvcellar.daemon.app; print({'numpy', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-P", "-c", program]) == b"set()\n"


def test_data_parallel_engines_get_a_region_each(make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar(KVCELLAR_ENGINES="2", KVCELLAR_CAPACITY="16Mi").start()
    for engine_id in ("eng_dp0", "eng_dp1"):
        assert sidecar.until_state("Ready", engine_id=engine_id)["reservedBytes"] == 16 * MIB
    assert sidecar.end()[0] == 0
    assert len(sidecar.files) == 6


# --- how it ends --------------------------------------------------------------------------------------


@pytest.fixture
def large(make_volume: MakeVolume, make_sidecar: MakeSidecar) -> Sidecar:
    """A sidecar whose region takes a while, in small pages."""
    return make_sidecar(
        on=make_volume(1024 * MIB), KVCELLAR_CAPACITY="768Mi", KVCELLAR_HUGE_PAGES="never"
    )


def assert_ends_well(sidecar: Sidecar) -> None:
    status, seconds = sidecar.end()
    assert (status, seconds < 2.0) == (0, True), (status, seconds)
    assert sidecar.complaint == ""


@pytest.mark.parametrize("state", ["Reserving", "Reserved", "Ready"])
def test_sigterm_ends_it_within_two_seconds_and_the_next_start_goes_on(
    large: Sidecar, state: str
) -> None:
    large.start()
    until(lambda: (owner := large.owner()) and owner.state == state, f"state {state}")
    before = large.owner()
    assert before is not None

    assert_ends_well(large)

    large.start()
    assert large.until_state("Ready")["reservedBytes"] == 768 * MIB
    after = large.owner()
    assert after is not None
    assert (after.nonce, after.data_inode) == (before.nonce, before.data_inode)
    assert large.events("region adopted")
    assert len(large.files) == 3


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_sigterm_during_the_start_ends_it_with_0(make_sidecar: MakeSidecar, delay_s: float) -> None:
    sidecar = make_sidecar().start()

    def catches_sigterm() -> bool:
        status = Path(f"/proc/{sidecar.process.pid}/status").read_text()
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)

    until(catches_sigterm, "the first line of the program")
    time.sleep(delay_s)  # how far it then is, is what varies
    assert_ends_well(sidecar)


def test_sigterm_in_state_failed_ends_it_with_0(make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar(KVCELLAR_CAPACITY="1Gi").start()
    sidecar.until_state("Failed")
    assert_ends_well(sidecar)
    assert sidecar.files == []


def test_a_request_that_never_ends_does_not_delay_the_end(make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    with socket.create_connection(("127.0.0.1", sidecar.port)) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        assert_ends_well(sidecar)


def test_stuck_threads_and_unread_answers_do_not_delay_the_end_together(
    make_sidecar: MakeSidecar,
) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    lock = os.open(sidecar.directory, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with socket.create_connection(("127.0.0.1", sidecar.port)) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        time.sleep(6)  # the sweep of orphans waits for the lock
        try:
            assert_ends_well(sidecar)
        finally:
            os.close(lock)


def test_silent_connections_do_not_take_every_descriptor(make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar().start("prlimit", "--nofile=128:128")
    limits = [limit["name"] for limit in sidecar.until_state("Ready")["limits"]]
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            address = ("127.0.0.1", sidecar.port)
            stack.enter_context(contextlib.suppress(ConnectionError))
            stack.enter_context(socket.create_connection(address))
        time.sleep(2.5)  # two looks at the limits
    until(lambda: sidecar.get("/livez")[0] == 200, "an answer")
    assert [limit["name"] for limit in sidecar.region()["limits"]] == limits
    assert sidecar.events("limits changed") == []


def test_asking_for_another_protocol_is_passed_over_in_silence(make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    with socket.create_connection(("127.0.0.1", sidecar.port), timeout=10) as connection:
        connection.sendall(
            b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert '"level": "WARNING"' not in sidecar.log.read_text()


def test_a_bad_chunked_body_costs_one_line_in_the_log_at_most(make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    head = b"GET /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    bodies = [b"zz\r\n", b"5\r\nhello", b"5\r\nhellox\r\n0\r\n\r\n"]
    for body in bodies:
        for is_answered in (False, True):
            with socket.create_connection(("127.0.0.1", sidecar.port), timeout=10) as connection:
                connection.sendall(head)
                answer = connection.recv(4096) if is_answered else b""
                connection.sendall(body)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(4096):
                    answer += part
            assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200")), answer
    assert sidecar.get("/livez")[0] == 200
    log = sidecar.log.read_text()
    lines = [line for line in log.splitlines() if '"level": "INFO"' not in line]
    assert len(lines) <= 2 * len(bodies), lines
    assert "Traceback" not in log


def test_sigkill_at_random_moments_leaves_one_region_and_no_more_memory(large: Sidecar) -> None:
    moments = random.Random(7)
    for _ in range(5):
        large.start()
        until(lambda: large.owner() or large.process.poll() is not None, "a region")
        time.sleep(moments.uniform(0.0, 0.6))
        large.end(signal.SIGKILL)
    large.start()
    large.until_state("Ready")
    assert len(large.files) == 3
    assert used_bytes(large.volume) == 768 * MIB + META_BYTES


# --- what does not fit --------------------------------------------------------------------------------


def test_under_fail_a_capacity_above_the_tmpfs_ends_it_with_3_and_leaves_nothing(
    make_sidecar: MakeSidecar, volume: Path
) -> None:
    sidecar = make_sidecar(KVCELLAR_CAPACITY="257Mi", KVCELLAR_ON_FAILURE="fail").start()
    waited = sidecar.run("wait", "--for", "plan", "--timeout", "20")
    assert sidecar.wait() == 3
    assert "size of the tmpfs" in sidecar.complaint
    assert "KVCELLAR_CAPACITY" in sidecar.complaint
    assert waited.returncode == 3
    assert json.loads(waited.stdout)["fits"] is False
    assert json.loads(waited.stdout)["bindingLimit"] == "tmpfs"
    assert "size of the tmpfs" in waited.stderr
    assert used_bytes(volume) == 0
    assert sidecar.files == []


def test_under_degrade_it_lives_and_opens_every_gate(make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar(KVCELLAR_CAPACITY="300Mi").start()
    sidecar.until_state("Failed")
    assert sidecar.get("/startupz")[0] == 200
    assert sidecar.get("/livez")[0] == 200
    status, problem = sidecar.get("/readyz")
    assert (status, json.loads(problem)["status"]) == (503, 503)
    for gate in ("plan", "settled"):
        waited = sidecar.run("wait", "--for", gate, "--timeout", "5")
        assert (waited.returncode, json.loads(waited.stdout)["fits"]) == (0, False)
        assert "region eng is Failed" in waited.stderr


def test_on_a_nearly_full_volume_engines_find_a_whole_page_or_none(
    make_sidecar: MakeSidecar, volume: Path
) -> None:
    with (volume / "neighbour").open("wb") as neighbour:
        os.posix_fallocate(neighbour.fileno(), 0, 256 * MIB - 5 * 4096)
    sidecar = make_sidecar().start()
    sidecar.until_state("Failed")
    time.sleep(0.5)  # it is told to the engines afterwards
    assert sidecar.owner() is None
    assert_ends_well(sidecar)
    assert used_bytes(volume) == 256 * MIB - 5 * 4096


ENTER = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of version 1 inside another one; both are removed afterwards."""
    top = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not (top / "memory.limit_in_bytes").exists():
        pytest.skip("this machine has no memory cgroups of version 1 that a test may make")
    outer = top / f"kvcellar-sidecar-{os.getpid()}"
    own = outer / "own"
    own.mkdir(parents=True)
    yield own
    until(
        lambda: all(_is_removed(directory) for directory in (own, outer)), "the cgroups are empty"
    )


def _is_removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("level", "limit"), [("own", "container memory limit"), ("parent", "memory limit of cgroup")]
)
def test_a_capacity_above_a_memory_cgroup_is_refused_and_nobody_is_killed(
    make_sidecar: MakeSidecar, volume: Path, memory_cgroup: Path, level: str, limit: str
) -> None:
    limited = memory_cgroup if level == "own" else memory_cgroup.parent
    (limited / "memory.limit_in_bytes").write_text(str(160 * MIB))
    sidecar = make_sidecar(KVCELLAR_CAPACITY="200Mi", KVCELLAR_ON_FAILURE="fail")
    sidecar.start("sh", "-ec", ENTER, "sh", str(memory_cgroup))
    assert sidecar.wait() == 3
    assert limit in sidecar.complaint
    assert used_bytes(volume) == 0


# --- settings that cannot be used ----------------------------------------------------------------------


def test_a_port_in_use_ends_it_with_2_before_anything_is_made(make_sidecar: MakeSidecar) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sidecar = make_sidecar(KVCELLAR_HTTP_PORT=str(port)).start()
        assert sidecar.wait() == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in sidecar.complaint
    assert sidecar.files == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("KVCELLAR_CAPACTIY", "1Gi", "KVCELLAR_CAPACTIY is not a setting"),
        ("KVCELLAR_ENGINE_ID", "../etc", "engine id '../etc'"),
        ("KVCELLAR_OWNER", "engine", "KVCELLAR_OWNER=engine"),
        ("KVCELLAR_HTTP_HOST", "192.0.2.1", "cannot listen on 192.0.2.1"),
        ("KVCELLAR_HTTP_HOST", "a..b", "cannot listen on a..b"),
    ],
)
def test_a_setting_that_cannot_be_used_ends_it_with_2_and_one_sentence(
    make_sidecar: MakeSidecar, name: str, text: str, said: str
) -> None:
    sidecar = make_sidecar(**{name: text}).start()
    assert sidecar.wait() == 2
    assert sidecar.complaint.startswith("kvcellar: ")
    assert said in sidecar.complaint
    assert sidecar.files == []


# --- where it listens ---------------------------------------------------------------------------------


IN_A_NETWORK_OF_ITS_OWN = """\
echo $0 >/proc/sys/net/ipv6/conf/default/disable_ipv6
echo $0 >/proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
exec "$@"
"""


@pytest.mark.parametrize(
    ("disabled", "answering"),
    [
        pytest.param("0", {"127.0.0.1", "::1"}, id="both families"),
        pytest.param("1", {"127.0.0.1"}, id="IPv6 disabled"),
    ],
)
def test_all_addresses_are_those_of_both_families_that_a_pod_has(
    make_sidecar: MakeSidecar, disabled: str, answering: set[str]
) -> None:
    sidecar = make_sidecar(KVCELLAR_HTTP_HOST="::")
    sidecar.start("unshare", "--net", "sh", "-ec", IN_A_NETWORK_OF_ITS_OWN, disabled)
    network = f"/proc/{sidecar.process.pid}/ns/net"
    ours = os.readlink("/proc/self/ns/net")
    until(lambda: os.readlink(network) != ours, "a network of its own")

    def is_reached(address: str, timeout_s: int) -> bool:
        asked = ("wait", "--for", "plan", "--timeout", str(timeout_s))
        inside = ("nsenter", f"--net={network}")
        return sidecar.run(*asked, wrapper=inside, KVCELLAR_HTTP_HOST=address).returncode == 0

    assert is_reached("::", 20), "the sidecar does not answer at all"
    assert {address for address in ("127.0.0.1", "::1") if is_reached(address, 1)} == answering


def test_all_addresses_are_those_of_ipv4_where_the_kernel_has_no_ipv6(
    make_sidecar: MakeSidecar,
) -> None:
    sidecar = make_sidecar(KVCELLAR_HTTP_HOST="::")
    no_family = ("-e", "trace=socket", "-e", "inject=socket:error=EAFNOSUPPORT:when=1")
    sidecar.start("strace", "-D", "-qq", "-o", f"{sidecar.log}.calls", *no_family)
    sidecar.until_state("Ready")
    assert Path(f"{sidecar.log}.calls").read_text().startswith("socket(AF_INET6")


# --- the commands beside it -----------------------------------------------------------------------------


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process with a sidecar's settings: status, stdout and stderr."""
    monkeypatch.setattr(cli, "_leave_on_sigterm", lambda status: None)

    def run(sidecar: Sidecar, *arguments: str) -> tuple[int, str, str]:
        for name, value in sidecar.environment.items():
            if name.startswith("KVCELLAR_"):
                monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = cli.main(arguments)
        return (status, *capsys.readouterr())

    return run


def test_clean_removes_what_nobody_owns_or_holds(
    make_sidecar: MakeSidecar, command: Command, volume: Path
) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    status, shown, said = command(sidecar, "clean")
    assert (status, shown.startswith("kept  eng.meta")) == (4, True)
    assert (
        said
        == "kvcellar: nothing was removed: all 1 found are owned or held, or not as kvcellar made them\n"
    )
    sidecar.end()

    engine = attach(sidecar.directory)
    status, shown, _ = command(sidecar, "clean")
    assert (status, "an engine holds it" in shown) == (4, True)
    region = json.loads(command(sidecar, "status", "--json")[1])["regions"][0]
    assert (region["state"], len(region["participants"])) == ("Ready", 1)
    engine.close()

    status, shown, _ = command(sidecar, "clean", "--dry-run")
    assert (status, shown.startswith("would be removed  eng.meta")) == (0, True)
    assert len(sidecar.files) == 3
    status, shown, _ = command(sidecar, "clean")
    assert (status, shown.startswith("removed  eng.meta")) == (0, True)
    assert used_bytes(volume) == 0
    assert command(sidecar, "clean") == (0, "nothing to remove\n", "")
    assert command(sidecar, "status") == (0, "no regions\n", "")


def test_clean_that_may_not_remove_says_so_and_removes_nothing(
    make_sidecar: MakeSidecar, volume: Path
) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    sidecar.end()
    before = sidecar.files
    sidecar.directory.chmod(0o550)
    cleaned = subprocess.run(
        # Root without its rights is held up by the mode, and still comes to the volume.
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all", KVCELLAR, "clean"],
        env=sidecar.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (cleaned.returncode, cleaned.stderr.count("\n")) == (2, 1)
    assert f"may not be cleaned by uid {os.geteuid()}" in cleaned.stderr
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    cleaned = sidecar.run("clean")
    assert cleaned.returncode == 2
    assert "mounted read-only" in cleaned.stderr
    assert sidecar.files == before


def test_clean_removes_loose_files_but_no_foreign_ones(
    make_sidecar: MakeSidecar, command: Command
) -> None:
    sidecar = make_sidecar()
    sidecar.directory.mkdir()
    names = ("eng.0123456789abcdef.data", "old.0123456789abcdef.index", "notes.txt")
    for name in names:
        (sidecar.directory / name).write_bytes(b"x")
    held = os.open(sidecar.directory / names[0], os.O_RDWR)
    assert locks.try_lock(held, locks.SLOT_BASE)
    status, shown, _ = command(sidecar, "clean")
    assert status == 0
    assert sorted(line.split()[:2] for line in shown.splitlines()) == [
        ["kept", names[0]],
        ["removed", names[1]],
    ]
    os.close(held)
    assert command(sidecar, "clean")[0] == 0
    assert sidecar.files == ["notes.txt"]


def test_a_damaged_page_is_shown_kept_and_ends_the_commands_with_5(
    make_sidecar: MakeSidecar, command: Command
) -> None:
    sidecar = make_sidecar()
    sidecar.directory.mkdir()
    (sidecar.directory / "eng.meta").write_bytes(b"\xff" * META_BYTES)
    for name, expected in (("status", "Failed"), ("clean", "kept  eng.meta")):
        status, shown, said = command(sidecar, name)
        assert (status, expected in shown, "damaged" in said) == (5, True, True)
    assert sidecar.files == ["eng.meta"]


@pytest.mark.parametrize(
    "arguments", [["status"], ["clean"], ["wait", "--for", "plan", "--timeout", "0.3"]]
)
def test_commands_without_sidecar_or_directory_say_so_and_end_with_6(
    make_sidecar: MakeSidecar, command: Command, arguments: list[str]
) -> None:
    status, shown, said = command(make_sidecar(), *arguments)
    assert (status, shown) == (6, "")
    assert said.startswith("kvcellar: ")
    assert said.count("\n") == 1


def test_the_commands_run_with_a_safe_path(make_sidecar: MakeSidecar) -> None:
    done = make_sidecar().run("status", PYTHONSAFEPATH="1")
    assert (done.returncode, done.stderr.count("\n")) == (6, 1)
