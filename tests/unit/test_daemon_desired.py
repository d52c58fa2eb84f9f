"""The desired state: its text, how strictly it is read, and what comes of files that cannot be used."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.contract import (
    MAX_DESIRED_BYTES,
    Contents,
    DesiredRegion,
    DesiredState,
    desired_text,
    parse_desired,
)
from kvcellar.daemon.desired import DesiredFile
from kvcellar.daemon.in_force import InForce
from kvcellar.daemon.retention import Retention, RetentionClock, parse_retention
from kvcellar.errors import InvalidDesiredState
from kvcellar_operator.podview import PodView
from kvcellar_operator.regions import desired as annotation

UID = "7b0c"
KEEP = Retention("keep", None)


def text(**regions: DesiredRegion) -> str:
    return desired_text(DesiredState(UID, regions))


# --- the text -----------------------------------------------------------------------------------------


def test_the_text_is_the_one_that_the_documents_show() -> None:
    assert text(b=DesiredRegion(2, "keep", "15m"), a=DesiredRegion(1, retention="now")) == (
        '{"podUID":"7b0c","regions":{"a":{"generation":1,"retention":"now"},'
        '"b":{"generation":2,"contents":"keep","retention":"15m"}}}'
    )


def test_what_the_controller_writes_is_what_the_sidecar_reads() -> None:
    pod = PodView.unknown("ns", "engine-0", UID)
    objects = [
        {
            "metadata": {"name": "x", "generation": 4},
            "spec": {"engineID": "eng_dp0", "retention": "1h30m"},
        },
        {
            "metadata": {"name": "y", "generation": 2},
            "spec": {"engineID": "eng_dp1", "contents": "keep", "retention": "now"},
        },
        {"metadata": {"name": "z", "generation": 9}, "spec": {"engineID": "eng_dp2"}},
    ]
    written = annotation(pod, objects)
    assert written is not None
    assert parse_desired(written.encode()) == DesiredState(
        UID,
        {
            "eng_dp0": DesiredRegion(4, None, "1h30m"),
            "eng_dp1": DesiredRegion(2, "keep", "now"),
        },
    )


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True),
        st.builds(
            DesiredRegion,
            st.integers(1, 2**63 - 1),
            st.sampled_from([None, *Contents]),
            st.sampled_from([None, "keep", "now", "90s", "1h30m"]),
        ),
        max_size=5,
    )
)
def test_every_state_is_read_back_as_it_was_written(regions: dict[str, DesiredRegion]) -> None:
    state = DesiredState(UID, regions)
    assert parse_desired(desired_text(state).encode()) == state


def test_keys_of_a_newer_controller_are_let_pass() -> None:
    body = {
        "podUID": UID,
        "schema": 2,
        "regions": {"a": {"generation": 1, "contents": None, "priority": {"high": 1}}},
    }
    assert parse_desired(json.dumps(body).encode()) == DesiredState(UID, {"a": DesiredRegion(1)})


@pytest.mark.parametrize("blank", [b"", b"\n", b"  \t"])
def test_an_empty_text_desires_nothing(blank: bytes) -> None:
    assert parse_desired(blank) is None


def with_region(entry: str) -> bytes:
    return f'{{"podUID":"{UID}","regions":{{"a":{entry}}}}}'.encode()


BAD = [
    (b"\xff\xfe", "not JSON"),
    ("{}".encode("utf-16"), "not JSON"),
    (b"{", "not JSON"),
    (b"[" * 200_000, "not JSON"),
    (b"1" * 10_000, "not JSON"),
    (b"x" * (MAX_DESIRED_BYTES + 1), "more than 262144 bytes"),
    (b"[]", "it is a list"),
    (b"null", "it is None"),
    (b'{"regions":{}}', "its podUID is no text"),
    (b'{"podUID":7,"regions":{}}', "its podUID is no text"),
    (b'{"podUID":"7b0c"}', "its regions is None"),
    (b'{"podUID":"7b0c","regions":{"../x":{"generation":1}}}', "no engine id"),
    (b'{"podUID":"7b0c","podUID":"8","regions":{}}', "stands twice"),
    (with_region("7"), "its region a is 7"),
    (with_region("{}"), "generation of its region a is None"),
    (with_region('{"generation":true}'), "is True"),
    (with_region('{"generation":1.0}'), "is 1.0"),
    (with_region('{"generation":NaN}'), "NaN is no number"),
    (with_region('{"generation":0}'), "is 0"),
    (with_region('{"generation":9223372036854775808}'), "is 9223372036854775808"),
    (with_region('{"generation":1,"contents":"burn"}'), "has to be discard or keep"),
    (with_region('{"generation":1,"contents":["keep"]}'), "is a list"),
    (with_region('{"generation":1,"retention":""}'), "has to be keep, now or a duration"),
    (with_region('{"generation":1,"retention":"0s"}'), "has to be keep, now or a duration"),
    (with_region('{"generation":1,"retention":5}'), "is 5: it has to be a text"),
    (with_region('{"generation":1,"retention":"\\u001b[31m\\ud800"}'), r"\x1b[31m\ud800"),
]


@pytest.mark.parametrize(("data", "said"), BAD)
def test_whatever_breaks_the_shape_is_refused_in_a_short_sentence(data: bytes, said: str) -> None:
    with pytest.raises(InvalidDesiredState) as refused:
        parse_desired(data)
    sentence = str(refused.value)
    assert said in sentence
    assert len(sentence) < 300
    assert sentence.isprintable()


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    with contextlib.suppress(InvalidDesiredState):
        parse_desired(data)


# --- the file -----------------------------------------------------------------------------------------


def test_the_file_is_followed_through_links_and_read_only_when_it_changed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "..data").symlink_to("real")
    link = tmp_path / "desired.json"
    link.symlink_to("..data/desired.json")
    file = DesiredFile(link, UID)
    assert not file.look()  # it is not there yet
    (tmp_path / "real" / "desired.json").write_text(text(a=DesiredRegion(1)))
    assert file.look()
    assert not file.look()
    assert file.current.regions == {"a": DesiredRegion(1)}


def test_a_stale_region_does_not_hold_up_the_others(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    file = DesiredFile(path, UID)
    path.write_text(text(a=DesiredRegion(5, retention="1h"), b=DesiredRegion(5)))
    assert file.look()
    path.write_text(text(a=DesiredRegion(4, retention="now"), b=DesiredRegion(6)))
    assert file.look()
    assert file.current.regions == {"a": DesiredRegion(5, None, "1h"), "b": DesiredRegion(6)}
    assert "generation 4 is below 5" in file.current.problem_of("a")
    assert file.current.problem_of("b") == ""
    path.write_text(text(b=DesiredRegion(6)))
    assert file.look()
    assert file.current.problem_of("a") == ""
    # Left out once, it counts anew.
    path.write_text(text(a=DesiredRegion(1), b=DesiredRegion(6)))
    assert file.look()
    assert file.current.regions["a"] == DesiredRegion(1)


def test_a_file_that_cannot_be_read_keeps_what_was_good(tmp_path: Path) -> None:
    path = tmp_path / "desired.json"
    path.write_text(text(a=DesiredRegion(5)))
    file = DesiredFile(path, UID)
    assert file.look()
    for spoil in (Path.mkdir, os.mkfifo, lambda p: p.symlink_to(p.name)):
        path.unlink()
        spoil(path)
        assert file.look()
        assert file.current.problem
        assert file.current.regions == {"a": DesiredRegion(5)}
        assert not file.look()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_text(text(a=DesiredRegion(5)))
        assert file.look()
        assert file.current.problem == ""


@pytest.mark.parametrize("spoil", [Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"{")])
def test_a_file_that_cannot_be_used_costs_no_descriptor(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    path = tmp_path / "desired.json"
    spoil(path)
    file = DesiredFile(path, UID)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        file.look()
    assert file.current.problem
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_path_nothing_is_ever_desired() -> None:
    assert not DesiredFile(None, None).look()


# --- what is in force ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "released_under", "then", "is_wanted"),
    [
        ("keep", "now", "now", False),
        ("keep", "now", None, True),
        ("keep", "now", "15m", True),
        ("now", None, None, False),
        ("now", None, "keep", True),
        ("15m", None, None, False),
        ("15m", None, "15m", False),
        ("15m", None, "now", False),
        ("15m", None, "keep", True),
        ("15m", "now", None, True),
    ],
)
def test_a_released_region_is_wanted_again_when_another_retention_is_in_force(
    start: str, released_under: str | None, then: str | None, is_wanted: bool
) -> None:
    retention = parse_retention(start)
    assert retention is not None
    in_force = InForce(retention)
    in_force.offer(DesiredRegion(1, retention=released_under))
    in_force.take({})
    in_force.was_released()
    in_force.offer(DesiredRegion(2, retention=then) if then else None)
    in_force.take({})
    assert in_force.wants_it_again is is_wanted


def test_as_a_start_setting_now_waits_for_the_first_engine() -> None:
    in_force = InForce(Retention("now", 0.0))
    assert not in_force.frees_unused
    in_force.offer(DesiredRegion(1, retention="now"))
    assert not in_force.frees_unused  # its keeper has not taken it up yet
    in_force.take({})
    assert in_force.frees_unused


def test_a_retention_set_later_counts_from_the_last_holder() -> None:
    now = 0.0
    clock = RetentionClock(lambda: now)
    assert not clock.is_over(KEEP, was_used=True, is_held=True)
    assert not clock.is_over(KEEP, was_used=True, is_held=False)
    now = 100.0
    assert not clock.is_over(KEEP, was_used=True, is_held=False)
    assert not clock.is_over(Retention("2m", 120.0), was_used=True, is_held=False)
    assert clock.is_over(Retention("90s", 90.0), was_used=True, is_held=False)
    assert not clock.is_over(Retention("90s", 90.0), was_used=True, is_held=True)
    assert not clock.is_over(Retention("90s", 90.0), was_used=True, is_held=False)
    assert not clock.is_over(Retention("now", 0.0), was_used=False, is_held=False)
