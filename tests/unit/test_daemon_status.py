"""What the sidecar shows: regions, plan, gate, totals of counters, metrics. No files, no clock."""

import json
import logging
from dataclasses import fields, replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from kvcellar import __version__, contract
from kvcellar.contract import (
    Contents,
    DesiredRegion,
    EngineId,
    LimitBody,
    Mode,
    OnFailure,
    OrphanBody,
    PlanBody,
    RegionState,
    Role,
)
from kvcellar.daemon.counters import CounterTotals
from kvcellar.daemon.logs import JsonFormatter
from kvcellar.daemon.metrics import new_registry
from kvcellar.daemon.oom import FirstToBeKilled
from kvcellar.daemon.status import RegionView, Status
from kvcellar.region.cgroups import Limit
from kvcellar.region.geometry import Geometry, Layout
from kvcellar.region.metadata import Counters, OwnerSection, SessionSection, SlotRow

MIB = 2**20
GEOMETRY = Geometry.compute(64 * MIB, 100_000, 2, Layout.SHARDED, 4096)
SESSION = SessionSection("ab" * 16, "cd" * 32, 3, 5, GEOMETRY)
OWNER = OwnerSection(
    RegionState.READY, "", Mode.PLUGIN, 64 * MIB, 4096, "0" * 16, 1, 2, 32 * MIB, 2 * MIB, 1.5, 0.5
)
SCHEDULER = SlotRow("ab" * 16, Role.SCHEDULER, 0, 100.0, False, Counters(used_chunks=10))
WORKER = SlotRow("ab" * 16, Role.WORKER, 1, 99.5, True, Counters(store_bytes=7, loads_failed=1))
VIEW = RegionView(
    engine_id=EngineId("a"),
    mode=Mode.PLUGIN,
    state=RegionState.READY,
    reason="",
    capacity_bytes=64 * MIB,
    owner=OWNER,
    session=SESSION,
    participants=(WORKER, SCHEDULER),
    totals=Counters(1, 2, 3, 4, 5, 6, 7, 8, 9, 0),
    reserved_bytes=64 * MIB,
    plan=PlanBody(True, 64 * MIB, 100 * MIB, "tmpfs", []),
    plan_decided=True,
)
STATUS = Status(
    (VIEW,),
    Contents.DISCARD,
    "15m",
    OnFailure.DEGRADE,
    (Limit("tmpfs", 200 * MIB, 64 * MIB), Limit("container", 400 * MIB, 300 * MIB)),
)
REFUSED = PlanBody(False, 64 * MIB, 5, "container", [LimitBody("container", 6, 1, True)])


def test_what_is_desired_takes_the_place_of_the_start_settings() -> None:
    desired = DesiredRegion(4, retention="now")
    status = replace(STATUS, regions=(replace(VIEW, desired=desired),))
    (body,) = status.regions_body().regions
    assert (body.contents, body.retention, body.observedGeneration) == ("discard", "now", 4)


def test_why_what_is_desired_is_not_used_stands_behind_the_region_s_own_reason() -> None:
    views = (replace(VIEW, reason="observed"), replace(VIEW, engine_id=EngineId("b")))
    problems = {EngineId("a"): "it is a list", EngineId("b"): "it is a list"}
    status = replace(STATUS, regions=views, desired_problems=problems)
    assert [body.reason for body in status.regions_body().regions] == [
        "observed; desired state not used: it is a list",
        "desired state not used: it is a list",
    ]
    assert status.not_ready() == ""
    assert samples(status)["kvcellar_region_desired_unused", frozenset({("engine_id", "b")})] == 1


# --- bodies -------------------------------------------------------------------------------------------


def test_a_region_is_shown_with_every_key_of_the_contract() -> None:
    assert contract.to_json(STATUS.regions_body()) == {
        "contractVersion": contract.CONTRACT_VERSION,
        "version": __version__,
        "regions": [
            {
                "engineId": "a",
                "mode": "plugin",
                "state": "Ready",
                "reason": "",
                "contents": "discard",
                "retention": "15m",
                "observedGeneration": 0,
                "generation": 3,
                "session": "ab" * 16,
                "fingerprint": "cd" * 32,
                "capacityBytes": 64 * MIB,
                "reservedBytes": 64 * MIB,
                "settledBytes": 32 * MIB,
                "hugePageBytes": 2 * MIB,
                "usedBytes": 10 * GEOMETRY.chunk_stride_bytes * 2,
                "unusedTailBytes": GEOMETRY.unused_tail_bytes,
                "geometry": {
                    "layout": "sharded",
                    "worldSize": 2,
                    "copies": 2,
                    "rankBytes": 32 * MIB,
                    "chunkStrideBytes": GEOMETRY.chunk_stride_bytes,
                    "numChunks": GEOMETRY.num_chunks,
                },
                "participants": [
                    {"role": "scheduler", "rank": 0, "since": 100.0, "pinned": False},
                    {"role": "worker", "rank": 1, "since": 99.5, "pinned": True},
                ],
                "engineStarts": 5,
                "limits": [
                    {
                        "name": "tmpfs",
                        "limitBytes": 200 * MIB,
                        "usageBytes": 64 * MIB,
                        "binding": False,
                    },
                    {
                        "name": "container",
                        "limitBytes": 400 * MIB,
                        "usageBytes": 300 * MIB,
                        "binding": True,
                    },
                ],
                "orphans": [],
            }
        ],
    }


def test_a_region_before_its_first_engine_has_no_geometry() -> None:
    body = replace(
        STATUS, regions=(RegionView(EngineId("a"), Mode.PLUGIN, RegionState.PLANNED, "", 1),)
    )
    shown = body.regions_body().regions[0]
    assert shown.geometry is None
    assert (shown.session, shown.fingerprint, shown.generation, shown.engineStarts) == (
        "",
        "",
        0,
        0,
    )
    assert (shown.usedBytes, shown.settledBytes, shown.unusedTailBytes) == (0, 0, 0)


def test_used_bytes_never_exceed_the_chunks_that_there_are() -> None:
    liar = replace(SCHEDULER, counters=Counters(used_chunks=2**60))
    assert replace(VIEW, participants=(liar,)).used_bytes == (
        GEOMETRY.num_chunks * GEOMETRY.chunk_stride_bytes * GEOMETRY.copies
    )


def test_an_orphan_is_shown_with_the_region_of_its_id_or_with_the_first() -> None:
    other = replace(VIEW, engine_id=EngineId("b.x"))
    names = ["b.x.0123456789abcdef.data", "gone.0123456789abcdef.index", "other.meta"]
    orphans = tuple(OrphanBody(name, 1, "kept", "why") for name in names)
    bodies = replace(STATUS, regions=(VIEW, other), orphans=orphans).regions_body().regions
    assert [orphan.name for orphan in bodies[0].orphans] == names[1:]
    assert [orphan.name for orphan in bodies[1].orphans] == names[:1]


# --- plan and gate ------------------------------------------------------------------------------------


def with_states(*states: RegionState, on_failure: OnFailure = OnFailure.DEGRADE) -> Status:
    views = tuple(
        replace(VIEW, state=state, reason="why")
        if state is RegionState.FAILED
        else replace(VIEW, state=state)
        for state in states
    )
    return replace(STATUS, regions=views, on_failure=on_failure)


def test_the_gate_is_shut_until_every_plan_is_decided() -> None:
    undecided = replace(VIEW, engine_id=EngineId("b"), plan=None, plan_decided=False)
    status = replace(STATUS, regions=(VIEW, undecided))
    assert status.not_started() == "the plan of region b has not been decided yet"
    assert status.plan() is None


@pytest.mark.parametrize(
    ("on_failure", "reason"),
    [(OnFailure.DEGRADE, ""), (OnFailure.FAIL, "region a is Failed: why")],
)
def test_a_failed_region_opens_the_gate_only_under_degrade(
    on_failure: OnFailure, reason: str
) -> None:
    status = with_states(RegionState.RESERVING, RegionState.FAILED, on_failure=on_failure)
    assert status.not_started() == reason


def test_a_sidecar_that_is_about_to_end_shuts_the_gate() -> None:
    assert replace(STATUS, stopped_by="too small").not_started() == "too small"


@pytest.mark.parametrize("state", list(RegionState))
def test_it_is_ready_when_every_region_can_be_attached_to(state: RegionState) -> None:
    reason = with_states(RegionState.READY, state).not_ready()
    assert (reason == "") is (state in (RegionState.RESERVED, RegionState.READY))
    assert reason == "" or reason.startswith(f"region a is {state}")


def test_plans_are_summed_and_the_refused_one_names_the_limit() -> None:
    small = replace(VIEW, plan=REFUSED)
    assert replace(STATUS, regions=(VIEW, small)).plan() == PlanBody(
        False, 128 * MIB, 100 * MIB, "container", REFUSED.limits
    )
    assert replace(STATUS, regions=(VIEW, VIEW)).plan() == PlanBody(
        True, 128 * MIB, 100 * MIB, "tmpfs", []
    )


# --- counters -----------------------------------------------------------------------------------------


def row(slot: int, since: float, **counters: int) -> tuple[int, SlotRow, bool]:
    return slot, SlotRow("ab" * 16, Role.WORKER, 0, since, False, Counters(**counters)), True


def test_totals_go_on_rising_over_engine_restarts() -> None:
    totals = CounterTotals()
    assert totals.add((row(0, 1.0, store_bytes=10), row(1, 1.0, load_bytes=3))).store_bytes == 10
    assert totals.add((row(0, 1.0, store_bytes=15), row(1, 1.0, load_bytes=3))).store_bytes == 15
    assert totals.add((row(0, 2.0, store_bytes=1),)).store_bytes == 16
    last = totals.add((row(0, 3.0, store_bytes=0), row(1, 3.0, load_bytes=4)))
    assert (last.store_bytes, last.load_bytes) == (16, 7)


def test_totals_do_not_fall_when_a_row_does() -> None:
    totals = CounterTotals()
    totals.add((row(0, 1.0, stores_ok=10),))
    assert totals.add((row(0, 1.0, stores_ok=2),)).stores_ok == 10
    assert totals.add(()).stores_ok == 10
    assert totals.add((row(0, 1.0, stores_ok=11),)).stores_ok == 11


# --- metrics ------------------------------------------------------------------------------------------

ENGINE = ("engine_id",)
METRICS = {
    "kvcellar_region_capacity_bytes": ENGINE,
    "kvcellar_region_resident_bytes": ENGINE,
    "kvcellar_region_used_bytes": ENGINE,
    "kvcellar_region_settle_ratio": ENGINE,
    "kvcellar_region_reserve_seconds": ENGINE,
    "kvcellar_region_settle_seconds": ENGINE,
    "kvcellar_region_participants": ("engine_id", "role"),
    "kvcellar_region_generation": ENGINE,
    "kvcellar_region_desired_unused": ENGINE,
    "kvcellar_region_state": ("engine_id", "state"),
    "kvcellar_transfer_bytes_total": ("direction", "engine_id"),
    "kvcellar_transfers_total": ("direction", "engine_id", "outcome"),
    "kvcellar_lookup_chunks_total": ("engine_id", "outcome"),
    "kvcellar_orphans_reclaimed_total": (),
    "kvcellar_orphans_reclaimed_bytes_total": (),
    "kvcellar_foreign_bytes": (),
    "kvcellar_tmpfs_size_bytes": (),
    "kvcellar_tmpfs_free_bytes": (),
    "kvcellar_memory_limit_bytes": ("scope",),
    "kvcellar_memory_usage_bytes": ("scope",),
    "kvcellar_build_info": ("version",),
}


def samples(status: Status) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = new_registry(lambda: status).collect()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_metrics_are_those_of_the_reference_and_no_others() -> None:
    found: dict[str, tuple[str, ...]] = {}
    for name, labels in samples(STATUS):
        found[name] = tuple(sorted(label for label, _ in labels))
    assert found == METRICS


def test_the_metrics_carry_the_values_of_the_status() -> None:
    status = replace(STATUS, reclaimed_files=2, reclaimed_bytes=4096, foreign_bytes=17)
    found = samples(status)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert value("kvcellar_region_resident_bytes", engine_id="a") == 64 * MIB
    assert value("kvcellar_region_settle_ratio", engine_id="a") == 0.5
    assert value("kvcellar_region_participants", engine_id="a", role="worker") == 1
    assert value("kvcellar_region_state", engine_id="a", state="Ready") == 1
    assert value("kvcellar_region_state", engine_id="a", state="Failed") == 0
    assert value("kvcellar_transfer_bytes_total", engine_id="a", direction="load") == 2
    assert [
        value("kvcellar_transfers_total", engine_id="a", direction=direction, outcome=outcome)
        for direction in ("store", "load")
        for outcome in ("ok", "failed")
    ] == [3, 4, 5, 6]
    assert [
        value("kvcellar_lookup_chunks_total", engine_id="a", outcome=outcome)
        for outcome in ("hit", "miss", "pending")
    ] == [7, 8, 9]
    assert value("kvcellar_orphans_reclaimed_total") == 2
    assert value("kvcellar_orphans_reclaimed_bytes_total") == 4096
    assert value("kvcellar_foreign_bytes") == 17
    assert value("kvcellar_tmpfs_free_bytes") == 136 * MIB
    assert value("kvcellar_memory_limit_bytes", scope="container") == 400 * MIB
    assert value("kvcellar_memory_usage_bytes", scope="container") == 300 * MIB
    assert value("kvcellar_build_info", version=__version__) == 1


def test_the_text_format_has_no_creation_times() -> None:
    assert b"_created" not in generate_latest(new_registry(lambda: STATUS))


# --- log lines and the oom score ----------------------------------------------------------------------


def test_a_log_record_is_one_line_of_json_with_its_fields() -> None:
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "INFO", "msg": "a\nb %s", "args": ("c",), "created": 0.0}
    )
    record.engine_id = "e"
    record.path = Path("/p")
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "level": "INFO",
        "event": "a\nb c",
        "logger": "x",
        "engine_id": "e",
        "path": "/p",
    }


def test_a_traceback_stays_in_its_line() -> None:
    with pytest.raises(ValueError, match="broken") as caught:
        int("broken")
    exception = (caught.type, caught.value, caught.tb)
    record = logging.makeLogRecord({"msg": "m", "exc_info": exception})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


def test_the_oom_score_is_high_while_anybody_reserves(tmp_path: Path) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text("-5\n")
    oom = FirstToBeKilled(score)
    with oom.raised():
        with oom.raised():
            assert score.read_text() == "1000"
        assert score.read_text() == "1000"
    assert score.read_text() == "-5"


def test_a_system_that_forbids_the_oom_score_is_left_as_it_is(tmp_path: Path) -> None:
    oom = FirstToBeKilled(tmp_path / "missing" / "oom_score_adj")
    with oom.raised():
        pass
    assert list(tmp_path.iterdir()) == []


def test_counters_of_the_page_are_those_that_are_shown() -> None:
    shown = {"store_bytes", "load_bytes", "stores_ok", "stores_failed", "loads_ok", "loads_failed"}
    shown |= {"lookup_hit", "lookup_miss", "lookup_pending", "used_chunks"}
    assert {field.name for field in fields(Counters)} == shown
