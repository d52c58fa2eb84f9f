"""What the owner of a region sees of it at one moment. Pure."""

from dataclasses import dataclass

from kvcellar.contract import Mode
from kvcellar.region.metadata import OwnerSection, SessionSection, SlotRow


@dataclass(frozen=True, slots=True)
class RegionSnapshot:
    """A region at one moment.

    Attributes:
        owner: the owner's own memory of it.
        session: what the last engine start wrote; None before the first, or if it is damaged.
        rows: (slot, row, held now) for every slot that was ever used.
        held: slots whose lock is held now, also those without a readable row.
        reserved_bytes: bytes that the file system has promised.
        damage: what is wrong with the files, in one sentence; empty if nothing is.
    """

    owner: OwnerSection
    session: SessionSection | None
    rows: tuple[tuple[int, SlotRow, bool], ...]
    held: tuple[int, ...]
    reserved_bytes: int
    damage: str

    @property
    def was_used(self) -> bool:
        """Whether an engine has ever held the region: in stock mode its row is all that says so."""
        return self.session is not None or (self.owner.mode is Mode.STOCK and bool(self.rows))
