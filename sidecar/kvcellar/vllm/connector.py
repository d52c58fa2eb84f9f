"""vLLM's offloading connector, in which a failed load becomes a recomputation."""

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvcellar.errors import ConfigurationError
from kvcellar.vllm.manager import RegionManager
from kvcellar.vllm.spec import KVCellarOffloadingSpec
from kvcellar.vllm.worker import RegionWorker

logger = logging.getLogger(__name__)


class KVCellarConnector(OffloadingConnector):
    """Reports the requests whose load failed; with any other transfer it is vLLM's own.

    The *request* is reported, not its blocks: that works for any number of KV cache groups, while
    vLLM refuses block ids for more than one. With `kv_load_failure_policy: recompute` vLLM gives the
    request's blocks back and schedules it anew, once all ranks have answered. In the same step, and
    before that, the scheduler's manager forgets the keys, or the request would load them for ever.

    Raises (constructor):
        ConfigurationError: the spec is not kvcellar's.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._request_of_load: dict[int, str] = {}
        if self.connector_worker is None:
            return
        spec = self.connector_worker.spec
        if not isinstance(spec, KVCellarOffloadingSpec):
            raise ConfigurationError(
                f"KVCellarConnector was given the spec {type(spec).__name__}: set "
                '"spec_name": "KVCellarOffloadingSpec" and "spec_module_path": "kvcellar.vllm" in '
                "kv_connector_extra_config"
            )
        spec.recomputes_failed_loads = True
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            logger.warning(
                'kv_load_failure_policy is "%s": a request whose load fails ends with an error; with '
                '"recompute" it is computed again',
                policy,
            )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        """Remember whose loads begin."""
        for job_id, job in self._get_connector_metadata().load_jobs.items():
            self._request_of_load[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Results of this step, with the requests whose load failed."""
        results = super().get_transfer_results(finished_req_ids)
        worker = self.connector_worker.worker
        if isinstance(worker, RegionWorker):
            failed = worker.take_failed_loads()
            results.failed_recving |= {self._request_of_load[job_id] for job_id in failed}
        if results.finished_recving:
            self._request_of_load = {
                job_id: req_id
                for job_id, req_id in self._request_of_load.items()
                if req_id not in results.finished_recving
            }
        return results

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell the manager which loads failed, before it is told that they are over."""
        manager = self.connector_scheduler.manager
        if isinstance(manager, RegionManager):
            manager.drop_failed_loads(connector_output.failed_recving or ())
        super().update_connector_output(connector_output)
