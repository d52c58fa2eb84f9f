"""A rank's side: vLLM's offloading worker over kvcellar's own. Called by the worker's one thread."""

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvcellar.errors import TransferFailed
from kvcellar.worker.offload import CPUOffloadingWorker


class RegionWorker(OffloadingWorker):
    """vLLM's view of a `CPUOffloadingWorker`.

    vLLM stops the engine at a transfer that it is told has failed, so a failed load is told in another
    way: under `KVCellarConnector` it counts as done and `take_failed_loads` names it, so that its
    request is computed again. Under vLLM's own connector nothing can go on, and that is said.
    """

    def __init__(self, worker: CPUOffloadingWorker, *, recomputes_failed_loads: bool) -> None:
        self._worker = worker
        self._recomputes = recomputes_failed_loads
        self._loads: set[int] = set()
        self._failed_loads: set[int] = set()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin a store.

        Raises:
            TransferFailed: this rank has no host memory, or was shut down.
        """
        is_accepted = self._worker.submit_store(
            job_id,
            src_spec.block_ids,
            src_spec.group_sizes,
            src_spec.block_indices,
            dst_spec.block_ids,
        )
        return _accepted("store", job_id, is_accepted=is_accepted)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Begin a load. After an expedited one vLLM 0.33 calls `wait`, so that needs nothing here.

        Raises:
            TransferFailed: this rank has no host memory, or was shut down.
        """
        del expedited
        is_accepted = self._worker.submit_load(
            job_id,
            dst_spec.block_ids,
            dst_spec.group_sizes,
            dst_spec.block_indices,
            src_spec.block_ids,
        )
        self._loads.add(job_id)
        return _accepted("load", job_id, is_accepted=is_accepted)

    def get_finished(self) -> list[TransferResult]:
        """Results since the last call.

        Raises:
            TransferFailed: a copy failed, and vLLM cannot go on.
        """
        results = []
        for finished in self._worker.get_finished():
            is_load = finished.job_id in self._loads
            self._loads.discard(finished.job_id)
            if not finished.ok:
                if not is_load or not self._recomputes:
                    raise TransferFailed(_fatal(finished.job_id, finished.error, is_load=is_load))
                self._failed_loads.add(finished.job_id)
            # vLLM counts a transfer only if it is given both figures.
            has_moved = finished.ok and finished.size_bytes > 0
            results.append(
                TransferResult(
                    job_id=finished.job_id,
                    success=True,
                    transfer_size=finished.size_bytes if has_moved else None,
                    transfer_time=finished.seconds if has_moved else None,
                )
            )
        return results

    def take_failed_loads(self) -> set[int]:
        """The failed ones among the loads that `get_finished` has reported since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def wait(self, job_ids: set[int]) -> None:
        """Block until no copy of these jobs runs; unknown ids are ignored."""
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """Drain, then let go of device and region."""
        self._worker.shutdown()


def _accepted(direction: str, job_id: int, *, is_accepted: bool) -> bool:
    if not is_accepted:
        raise TransferFailed(
            f"{direction} {job_id} was refused: this rank has no host memory or is shut down, and the "
            "scheduler does not know; start the engine again"
        )
    return True


def _fatal(job_id: int, error: str, *, is_load: bool) -> str:
    if is_load:
        return (
            f"load {job_id} failed twice ({error}), and vLLM's OffloadingConnector cannot compute its "
            'blocks again, so the engine stops: with "kv_connector": "KVCellarConnector", '
            '"kv_connector_module_path": "kvcellar.vllm" and "kv_load_failure_policy": "recompute" it '
            "goes on"
        )
    return f"store {job_id} failed and could not be marked as such, so the engine stops: {error}"
