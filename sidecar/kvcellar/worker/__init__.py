"""The engine's side of kvcellar: attach to a region, and move KV blocks between it and the device.

`attach` joins a rank to its region, `CPUOffloadingWorker` copies; `kvcellar.vllm` plugs both into
vLLM. Imported inside an engine: nothing here may start threads, read the environment or probe
devices at import. torch is not needed, and vLLM must not be.
"""

from kvcellar.worker.attach import attach
from kvcellar.worker.attached import Region
from kvcellar.worker.offload import CPUOffloadingWorker
from kvcellar.worker.platforms import uses_region

__all__ = ["CPUOffloadingWorker", "Region", "attach", "uses_region"]
