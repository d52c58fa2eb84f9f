"""The plug-in that vLLM loads by `spec_module_path` and `kv_connector_module_path`.

The only package that imports vLLM. It puts vLLM's types around what others decide: `kvcellar.plugin`
(settings, identity, the scheduler's book) and `kvcellar.worker` (attaching, copying).

Every name of vLLM that is used here is public, or meant for subclasses. Source: vLLM 0.31 and 0.32,
vllm/v1/kv_offload and vllm/distributed/kv_transfer/kv_connector/v1. Importing has no side effect, since
vLLM's API servers import it too; with a vLLM that kvcellar was not tested with it fails with one
sentence. For that the one variable KVCELLAR_VLLM_UNTESTED is read here; all others are read when a spec
is made.
"""

import os

import vllm.version

from kvcellar.contract import ENV_VLLM_UNTESTED
from kvcellar.plugin.settings import check_version

check_version(
    vllm.version.__version__, is_untested_allowed=os.environ.get(ENV_VLLM_UNTESTED) == "1"
)

# Only now, so that another version gets the sentence and not the first name that it lacks.
from kvcellar.vllm.connector import KVCellarConnector  # noqa: E402
from kvcellar.vllm.spec import KVCellarOffloadingSpec  # noqa: E402

__all__ = ["KVCellarConnector", "KVCellarOffloadingSpec"]
