"""The real code with one rule of the protocol left out: each has to be found by some schedule."""

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from kvcellar.contract import EngineId
from kvcellar.region import joining, locks, making, metafile, participants, survey, syscalls
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.joining import JoinRequest, Place
from kvcellar.region.metadata import OwnerSection, SlotRow
from kvcellar.region.metafile import MetaContents
from kvcellar.region.names import data_name, index_name, meta_name
from kvcellar.region.owner import OwnedRegion

LeaveOut = Callable[[pytest.MonkeyPatch], None]


def the_big_lock(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def lock(self: RegionDirectory, timeout_s: float = 10.0) -> Iterator[None]:
        yield

    patch.setattr(RegionDirectory, "lock", lock)


def the_identity_check_before_an_unlink(patch: pytest.MonkeyPatch) -> None:
    def unlink_if(self: RegionDirectory, name: str, identity: tuple[int, int]) -> bool:
        return self.unlink_regular(name)

    patch.setattr(RegionDirectory, "unlink_if", unlink_if)


def looking_at_the_page_by_name_before_a_release(patch: pytest.MonkeyPatch) -> None:
    def remove(
        directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection, meta: tuple[int, int]
    ) -> None:
        directory.unlink_regular(meta_name(engine_id))
        directory.unlink_if(
            data_name(engine_id, owner.nonce), (owner.data_device, owner.data_inode)
        )
        directory.unlink_regular(index_name(engine_id, owner.nonce))

    patch.setattr(making, "remove", remove)


def the_slot_check_before_a_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnedRegion, "held", lambda self: False)


def the_slot_check_before_an_adoption(patch: pytest.MonkeyPatch) -> None:
    """An owner that makes anew what it could adopt, without looking who holds it."""
    patch.setattr(making, "_still_wanted", lambda *arguments: False)


def the_slot_check_before_loose_files_are_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(survey, "_held", lambda *arguments: False)


def the_owner_byte(patch: pytest.MonkeyPatch) -> None:
    real = locks.try_lock

    def try_lock(fd: int, byte: int) -> bool:
        return byte == locks.OWNER_BYTE or real(fd, byte)

    patch.setattr(locks, "try_lock", try_lock)


def waiting_for_ranks_that_linger(patch: pytest.MonkeyPatch) -> None:
    def come_in(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
        return ""

    patch.setattr(participants, "others_are_gone", come_in)
    patch.setattr(joining, "others_are_gone", come_in)


def waiting_of_the_other_ranks(patch: pytest.MonkeyPatch) -> None:
    """Ranks above 0 that trust the session on the page and do not look at the slots."""

    def session_is_ours(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
        session = contents.session
        return "" if session and session.session == request.session else "another session"

    patch.setattr(participants, "session_is_ours", session_is_ours)


def writing_the_row_before_the_slot_is_taken(patch: pytest.MonkeyPatch) -> None:
    def take(self: Place, slot: int, row: SlotRow) -> None:
        locks.try_lock(self.data_fd, locks.SLOT_BASE + slot)
        self.slot, self.row = slot, row
        metafile.write_slot(self.meta_fd, slot, row)

    patch.setattr(Place, "take", take)


def looking_for_all_ranks_before_the_scheduler_comes_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(participants, "all_ranks_are_here", joining.session_is_ours)


def refusing_to_rename_over_a_page(patch: pytest.MonkeyPatch) -> None:
    """Shows only where the big lock is left out too: the rename is the second line."""
    the_big_lock(patch)

    def rename(dir_fd: int, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    patch.setattr(syscalls, "rename_no_replace", rename)


# Two rules more, `waiting_of_the_other_ranks` and `writing_the_row_before_the_slot_is_taken`, show in so
# few schedules that tests/integration/test_region_protocol.py plays those by hand.
RULES: tuple[LeaveOut, ...] = (
    the_big_lock,
    the_identity_check_before_an_unlink,
    looking_at_the_page_by_name_before_a_release,
    the_slot_check_before_a_release,
    the_slot_check_before_an_adoption,
    the_slot_check_before_loose_files_are_removed,
    the_owner_byte,
    waiting_for_ranks_that_linger,
    looking_for_all_ranks_before_the_scheduler_comes_in,
    refusing_to_rename_over_a_page,
)
