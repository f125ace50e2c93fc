"""Save: one save, from the division of the work to the new folder in its place.

    plan (all ranks)  ->  [ snapshot ]  ->  write (each rank its part)  ->  finish, commit (rank 0)

Everything before the write happens where the caller is. What follows needs only files and two
exchanges of small objects, so a thread can do it, through a process group of its own.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from .checkpoint_folder import CheckpointFolder
from .checkpoint_planner import Piece, SaveEntries, Value, checksums
from .checkpoint_ranks import Ranks, explained


class Save:
    """A save whose parts are divided among ``ranks``: nothing is written yet but an empty folder.

    All ranks make it together, and all or none get it.

    Args:
        caller: the public function, for messages.
        folder: where the checkpoint will be.
        entries: what this rank could write; the same keys everywhere.

    Raises:
        ValueError, RuntimeError: on every rank when any rank cannot go on.
    """

    def __init__(
        self,
        caller: str,
        folder: CheckpointFolder,
        entries: dict[str, Piece | Value],
        ranks: Ranks,
    ) -> None:
        self._folder = folder
        self._unchanged = f"{caller}: {folder.path} could not be written and is unchanged"
        self._uncertain = f"{caller}: {folder.path} may or may not have been replaced"
        self._planner = SaveEntries(entries)
        self._is_first = ranks.rank == 0
        self._metadata: Metadata | None = None
        with explained(self._unchanged):
            self._scratch = ranks.first(folder.begin)
        try:
            with explained(self._unchanged):
                self._writer = FileSystemWriter(self._scratch)
                plans = ranks.to_first(ranks.together(self._own_plan))
                plans = ranks.together(lambda: self._divided(plans))
                self._plan = self._planner.finish_plan(ranks.from_first(plans))
        except BaseException:
            self._discard()
            raise

    def snapshot(self, ranks: Ranks) -> None:
        """Copy what this rank writes to host memory, so that training may change it."""
        try:
            with explained(self._unchanged):
                ranks.together(lambda: self._planner.snapshot(self._plan))
        except BaseException:
            self._discard()
            raise

    def complete(self, ranks: Ranks) -> None:
        """Write, and put the new checkpoint in its place.

        Raises:
            RuntimeError: on every rank when any rank cannot write.
        """
        try:
            with explained(self._unchanged):
                results = ranks.to_first(ranks.together(self._write))
            with explained(self._uncertain):
                ranks.first(lambda: self._publish(results))
        except BaseException:
            self._discard()
            raise

    def _own_plan(self) -> SavePlan:
        self._planner.set_up_planner({}, self._writer.storage_meta(), self._is_first)
        self._writer.set_up_storage_writer(self._is_first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _divided(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: for each rank what it writes, without what another one writes."""
        if not self._is_first:
            return []
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def _write(self) -> list[WriteResult]:
        with checksums():
            done = self._writer.write_data(self._plan, self._planner)
            return done.wait()

    def _publish(self, results: list[list[WriteResult]]) -> None:
        assert self._metadata is not None
        self._writer.finish(self._metadata, results)
        self._folder.commit(self._scratch)

    def _discard(self) -> None:
        if self._is_first:
            self._folder.discard(self._scratch)
