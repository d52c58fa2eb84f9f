"""Limits read from recorded trees, and the arithmetic of the plan."""

import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.contract import MAX_CAPACITY_BYTES
from kvcellar.errors import DoesNotFit
from kvcellar.region import cgroups, memory
from kvcellar.region.cgroups import Limit, cgroup_limits
from kvcellar.region.memory import node_limit, plan, read_limits

TREES = Path(__file__).parents[1] / "fakes" / "cgroup"
MIB = 2**20
GIB = 2**30
POD_SLICE = "kubepods-burstable-pod1f6b2c84_7a53_4d0e_9f1b_2f5f0c1d8e6a.slice"


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _v2_tree(root: Path, path: str, mount_root: str = "/", **files: str) -> Path:
    """A version 2 machine with memory files (`max`, `current`...) in the mount's top directory."""
    mountinfo = f"31 24 0:26 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    _write(root, {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mountinfo})
    return _write(root, {f"sys/fs/cgroup/memory.{key}": text for key, text in files.items()})


# --- recorded trees


def test_v2_on_a_kubelet_host_shows_container_pod_and_node_levels() -> None:
    assert cgroup_limits(TREES / "v2-kubelet-host") == [
        Limit("container", 16 * GIB, GIB),
        Limit("container:high", 15 * GIB, GIB),
        Limit(f"ancestor:{POD_SLICE}", 24 * GIB, 12 * GIB),
        Limit("ancestor:kubepods.slice", 120 * GIB, 50 * GIB),
    ]


def test_v2_in_a_container_shows_its_own_limit_less_inactive_page_cache() -> None:
    assert cgroup_limits(TREES / "v2-container-namespace") == [
        Limit("container", 2 * GIB, 200 * MIB)
    ]


def test_v1_in_a_container_shows_the_hidden_limit_above_it() -> None:
    assert cgroup_limits(TREES / "v1-container") == [
        Limit("container", 8 * GIB, 448 * MIB),
        Limit("hierarchy", 6 * GIB, 448 * MIB),
    ]


def test_v1_on_a_host_names_the_ancestor_that_limits_and_not_the_hierarchy() -> None:
    assert cgroup_limits(TREES / "v1-host") == [Limit("ancestor:workload", 4 * GIB, GIB)]


def test_a_hybrid_system_is_read_where_its_memory_controller_is() -> None:
    assert cgroup_limits(TREES / "hybrid-systemd") == [Limit("container", 3 * GIB, 768 * MIB)]


@pytest.mark.parametrize("case", sorted(path.name for path in TREES.iterdir() if path.is_dir()))
def test_every_tree_gives_distinct_names_and_a_node_limit(case: str) -> None:
    names = [limit.name for limit in cgroup_limits(TREES / case)]
    assert names
    assert len(set(names)) == len(names)
    assert node_limit(TREES / case) == Limit("node", 131072000 * 1024, 32768000 * 1024)


# --- where the cgroup is


def test_a_host_path_behind_a_mount_of_the_container_means_the_top_of_the_mount(
    tmp_path: Path,
) -> None:
    tree = _v2_tree(tmp_path, "/kubepods/pod1/c1", max="1000\n", current="1\n")
    assert cgroup_limits(tree) == [Limit("container", 1000, 1)]


def test_a_path_outside_the_root_of_the_mount_means_the_top_of_the_mount(tmp_path: Path) -> None:
    tree = _v2_tree(tmp_path, "/kubepods/pod1/c1", "/docker/c1", max="1000\n", current="1\n")
    assert cgroup_limits(tree) == [Limit("container", 1000, 1)]


def test_a_sibling_with_a_longer_name_is_not_taken_for_a_parent(tmp_path: Path) -> None:
    tree = _v2_tree(tmp_path, "/pod10/c", "/pod1", max="1000\n", current="1\n")
    _write(tree, {"sys/fs/cgroup/0/c/memory.max": "7", "sys/fs/cgroup/0/c/memory.current": "1"})
    assert cgroup_limits(tree) == [Limit("container", 1000, 1)]


def test_a_mount_from_outside_the_cgroup_namespace_shows_an_ancestor(tmp_path: Path) -> None:
    tree = _v2_tree(tmp_path, "/", "/../..", max="1000\n", current="1\n")
    assert cgroup_limits(tree) == [Limit("ancestor:/../..", 1000, 1)]


@pytest.mark.parametrize(("path", "mount_root"), [("/../other", "/"), ("/", "/../other")])
def test_a_mount_that_shows_other_cgroups_only_gives_no_limit(
    tmp_path: Path, path: str, mount_root: str
) -> None:
    assert cgroup_limits(_v2_tree(tmp_path, path, mount_root, max="1000", current="1")) == []


def test_the_mount_that_shows_most_of_the_chain_is_read(tmp_path: Path) -> None:
    mounts = [
        "30 1 0:26 /../.. /outer rw - cgroup2 cgroup2 rw",
        "31 1 0:26 /a/b /own\\040mount rw shared:1 master:2 - cgroup2 cgroup2 rw",
        "32 1 0:26 / /whole rw - cgroup2 cgroup2 rw",
    ]
    files = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": "\n".join(mounts[:2])}
    for top, size in [("outer", 1), ("own mount", 20), ("whole/a/b", 20), ("whole/a", 30)]:
        files |= {f"{top}/memory.max": f"{size}", f"{top}/memory.current": "5"}
    tree = _write(tmp_path, files)
    assert cgroup_limits(tree) == [Limit("container", 20, 5)]
    _write(tree, {"proc/self/mountinfo": "\n".join(mounts)})
    assert cgroup_limits(tree) == [Limit("container", 20, 5), Limit("ancestor:a", 30, 5)]


def test_ancestors_with_one_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    tree = _v2_tree(tmp_path, "/a/a/own")
    for folder in ("a", "a/a"):
        top = f"sys/fs/cgroup/{folder}"
        _write(tree, {f"{top}/memory.max": "100", f"{top}/memory.current": "5"})
    (tree / "sys/fs/cgroup/a/a/own").mkdir()
    assert [limit.name for limit in cgroup_limits(tree)] == ["ancestor:a", "ancestor:/a"]


# --- files that say nothing, or that are not there


@pytest.mark.parametrize(
    "text", ["max\n", "9223372036854771712\n", "9223372036854710272\n", "9223372036854775807\n"]
)
def test_no_limit_is_left_out(tmp_path: Path, text: str) -> None:
    assert cgroup_limits(_v2_tree(tmp_path, "/", max=text, current="1\n")) == []


def test_a_limit_of_zero_is_a_limit(tmp_path: Path) -> None:
    tree = _v2_tree(tmp_path, "/", max="0\n", current="4096\n")
    assert cgroup_limits(tree) == [Limit("container", 0, 4096)]
    assert cgroup_limits(tree)[0].free_bytes == 0


@pytest.mark.parametrize("missing", ["max", "current"])
def test_a_file_that_vanished_skips_its_limit_only_and_is_logged_once(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    tree = _v2_tree(tmp_path, "/own", max="900\n", current="1\n")
    files = {"max": "100\n", "current": "1\n", "high": "50\n"}
    files.pop(missing)
    _write(tree, {f"sys/fs/cgroup/own/memory.{key}": text for key, text in files.items()})
    kept = [] if missing == "current" else [Limit("container:high", 50, 1)]
    with caplog.at_level(logging.DEBUG, logger=cgroups.__name__):
        assert cgroup_limits(tree) == [*kept, Limit("ancestor:/", 900, 1)]
        assert cgroup_limits(tree) == [*kept, Limit("ancestor:/", 900, 1)]
    lines = [line for line in caplog.messages if f"own/memory.{missing} reason=No such" in line]
    assert len(lines) == 1
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


@pytest.mark.parametrize("text", ["", "\n", "many\n", "12three\n", "-5\n"])
def test_a_file_that_is_no_number_skips_its_limit(tmp_path: Path, text: str) -> None:
    assert cgroup_limits(_v2_tree(tmp_path, "/", max=text, current="1\n")) == []


@pytest.mark.parametrize(
    ("cgroup", "mountinfo"),
    [("", ""), ("\n:\nx", "\n - \nshort line - cgroup2\n"), ("4:memory:/a\n", ""), ("0::/", "")],
)
def test_a_machine_without_cgroups_has_no_limits(
    tmp_path: Path, cgroup: str, mountinfo: str
) -> None:
    assert cgroup_limits(tmp_path) == []
    _write(tmp_path, {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo})
    assert cgroup_limits(tmp_path) == []
    assert node_limit(tmp_path) is None


# --- all limits of a directory


def _fake_statvfs(monkeypatch: pytest.MonkeyPatch, blocks: int, free: int) -> None:
    result = SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: result)


def test_a_directory_is_bound_by_tmpfs_cgroups_pod_and_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _fake_statvfs(monkeypatch, 1000, 400)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        limits = read_limits(fd, pod_limit_bytes=4 * GIB, root=TREES / "v2-container-namespace")
        known = read_limits(
            fd, pod_limit_bytes=4 * GIB, pod_usage_bytes=GIB, root=TREES / "v2-container-namespace"
        )
    finally:
        os.close(fd)
    assert [limit.name for limit in limits] == ["tmpfs", "container", "pod", "node"]
    assert limits[0] == Limit("tmpfs", 1000 * 4096, 600 * 4096)
    assert limits[2] == Limit("pod", 4 * GIB, 200 * MIB)
    assert known[2] == Limit("pod", 4 * GIB, GIB)


def test_a_file_system_without_a_size_is_no_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _fake_statvfs(monkeypatch, 0, 0)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert memory.tmpfs_limit(fd) is None
        assert [limit.name for limit in read_limits(fd, root=TREES / "v1-host")] == [
            "ancestor:workload",
            "node",
        ]
    finally:
        os.close(fd)


def test_pages_of_a_hugetlbfs_are_not_counted_by_cgroup_and_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = os.stat(tmp_path).st_dev
    line = f"31 1 {os.major(device)}:{os.minor(device)} / /huge rw - hugetlbfs none rw\n"
    _write(tmp_path, {"proc/self/mountinfo": line, "proc/meminfo": "MemTotal: 9 kB\n"})
    _fake_statvfs(monkeypatch, 10, 10)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_limits(fd, pod_limit_bytes=5, root=tmp_path) == [Limit("tmpfs", 40960, 0)]
    finally:
        os.close(fd)


def test_a_real_directory_reports_the_size_of_its_file_system(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert stat.S_ISDIR(os.fstat(fd).st_mode)
        limit = memory.tmpfs_limit(fd)
        assert limit
        assert 0 <= limit.usage_bytes <= limit.limit_bytes
    finally:
        os.close(fd)


# --- the plan

NAMES = ["tmpfs", "container", "container:high", "pod", "node", "hierarchy", "ancestor:a"]
SIZES = st.integers(0, 2**50)
LIMITS = st.lists(
    st.builds(Limit, st.sampled_from(NAMES), SIZES, SIZES),
    max_size=7,
    unique_by=lambda limit: limit.name,
)


@given(LIMITS, SIZES, SIZES, SIZES, SIZES)
def test_what_fits_still_fits_when_less_is_asked(
    limits: list[Limit], asked: int, less: int, promised: int, margin: int
) -> None:
    more = plan(max(asked, less), limits, promised, margin_bytes=margin)
    fewer = plan(min(asked, less), limits, promised, margin_bytes=margin)
    assert fewer.fits or not more.fits
    assert more.free_bytes == fewer.free_bytes
    assert more.fits == (max(asked, less) <= more.free_bytes)


@given(LIMITS, SIZES, SIZES, SIZES)
def test_the_binding_limit_leaves_least_room(
    limits: list[Limit], asked: int, promised: int, margin: int
) -> None:
    whole = plan(asked, limits, promised, margin_bytes=margin)
    alone = {
        limit.name: plan(asked, [limit], promised, margin_bytes=margin).free_bytes
        for limit in limits
    }
    assert whole.free_bytes == min(alone.values(), default=MAX_CAPACITY_BYTES)
    assert (
        whole.binding_limit == ""
        if not limits
        else alone[whole.binding_limit] == min(alone.values())
    )


@given(LIMITS, SIZES, SIZES, SIZES)
def test_promises_and_margins_never_make_room(
    limits: list[Limit], asked: int, promised: int, margin: int
) -> None:
    free = plan(asked, limits).free_bytes
    assert plan(asked, limits, promised).free_bytes <= free
    assert plan(asked, limits, margin_bytes=margin).free_bytes <= free


@given(st.integers(1, 2**50))
def test_a_cgroup_that_holds_the_overhead_is_exactly_enough(asked: int) -> None:
    needed = asked + -(-asked * 3 // 1000)
    assert plan(asked, [Limit("container", needed, 0)]).fits
    assert not plan(asked, [Limit("container", needed - 1, 0)]).fits


def test_a_tmpfs_holds_exactly_its_free_bytes() -> None:
    limits = [Limit("tmpfs", 100, 40)]
    assert plan(60, limits, margin_bytes=50).fits
    assert not plan(61, limits).fits
    assert not plan(60, limits, 1).fits


def test_promises_of_other_containers_spare_the_container_limit() -> None:
    limits = [Limit("container", 2006, 0), Limit("pod", 4012, 0)]
    assert plan(1000, limits, 2000).binding_limit == "container"
    apart = plan(2000, limits, 2000, own_promised_bytes=0)
    assert apart.fits
    assert not plan(2001, limits, 2000, own_promised_bytes=0).fits


def test_without_a_limit_everything_fits() -> None:
    decided = plan(MAX_CAPACITY_BYTES, [])
    assert decided.fits
    assert decided.binding_limit == ""


# --- words


def test_a_refusal_names_what_was_asked_what_is_free_and_the_remedy() -> None:
    limits = [Limit("tmpfs", 2 * GIB, 0), Limit("container", 512 * MIB, 507 * MIB)]
    error = plan(GIB, limits).refusal("llama")
    assert str(error) == (
        "region llama needs 1073741824 bytes (1.0 GiB), but the container memory limit leaves "
        "5227198 bytes (5.0 MiB) of 512.0 MiB free; lower KVCELLAR_CAPACITY or raise the memory "
        "limit of the kvcellar container, or of the pod if only that has one"
    )
    assert isinstance(error, DoesNotFit)
    assert (error.asked_bytes, error.free_bytes, error.binding_limit) == (GIB, 5227198, "container")


def test_a_refusal_tells_what_is_promised_to_other_regions() -> None:
    message = str(plan(GIB, [Limit("tmpfs", GIB, 100)], 512 * MIB).refusal("llama"))
    assert "the size of the tmpfs leaves 536870812 bytes (512.0 MiB) of 1.0 GiB free" in message
    assert "free after 512.0 MiB promised to other regions; lower KVCELLAR_CAPACITY or" in message


@pytest.mark.parametrize("name", [*NAMES, "ancestor:a:high"])
def test_every_limit_has_words_of_its_own(name: str) -> None:
    message = str(plan(10, [Limit(name, 5, 0)]).refusal("x"))
    assert message.startswith("region x needs 10 bytes (10 bytes), but the ")
    assert "; lower KVCELLAR_CAPACITY or " in message


def test_the_body_marks_the_binding_limit() -> None:
    limits = [Limit("tmpfs", 100, 40), Limit("node", 50, 0)]
    body = memory.to_body(plan(60, limits))
    assert (body.fits, body.askedBytes, body.freeBytes, body.bindingLimit) == (
        False,
        60,
        49,
        "node",
    )
    assert [(one.name, one.limitBytes, one.usageBytes, one.binding) for one in body.limits] == [
        ("tmpfs", 100, 40, False),
        ("node", 50, 0, True),
    ]
