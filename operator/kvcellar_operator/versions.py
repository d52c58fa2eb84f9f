"""Whether every kubelet of the cluster knows native sidecars: 1.29 or newer.

An older one drops the field that makes an init container a sidecar, and the pod hangs in its start for ever.
"""

import logging
import re

from kvcellar_operator.cluster import Api, Forbidden
from kvcellar_operator.objects import JsonObject

logger = logging.getLogger(__name__)

_NEEDED = (1, 29)
_ALWAYS = (1, 32)
"""From this version of the API server on no kubelet can be older: it may lag by three.
Source: https://kubernetes.io/releases/version-skew-policy/"""


async def has_native_sidecars(api: Api) -> bool:
    """Ask the API server and, if its version leaves it open, look at the nodes.

    Raises:
        ApiFailure: the API server does not answer.
    """
    server = await api.get("/version")
    if parse_version(f"{server.get('major')}.{server.get('minor')}") >= _ALWAYS:
        return True
    try:
        async for page in api.pages("/api/v1/nodes", {}):
            for node in page.get("items") or ():
                if parse_version(_kubelet(node)) < _NEEDED:
                    logger.error("node %s is older than 1.29", node["metadata"]["name"])
                    return False
    except Forbidden:
        logger.warning("nodes cannot be listed; every kubelet is taken to be 1.29 or newer")
    return True


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor of a version such as v1.36.3, or of 1.29+ as clouds write it; 0.0 if it is none."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _kubelet(node: JsonObject) -> str:
    return str(((node.get("status") or {}).get("nodeInfo") or {}).get("kubeletVersion", ""))
