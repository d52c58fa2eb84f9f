"""``make cluster-demo``: kvcellar and a vLLM that it is injected into, in the cluster of ``make cluster``.

Run it again after a change of the code: the image is made anew and rolled out.
"""

import sys

from tests.cluster import vllm_pods
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import ROOT
from tests.cluster.box.errors import BoxError
from tests.cluster.box.programs import programs
from tests.cluster.images.recipes import KVCELLAR_IMAGE

FOLDER = ROOT / ".tools" / "cluster"
NAMESPACE = "demo"
_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
_READY_S = 300.0

_WHAT_NOW = """\
vLLM runs in the namespace demo, with kvcellar beside it. Try:

  eval "$(make -s cluster)"
  kubectl -n demo get pods,kvreg
  kubectl -n demo describe kvreg
  kubectl -n demo logs deploy/vllm -c kvcellar
  curl -s http://{address}:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "tiny", "prompt": "'"$(echo w{{3..400}})"'", "max_tokens": 8, "temperature": 0}}'
  curl -s http://{address}:9785/metrics
  kubectl -n demo exec deploy/vllm -c vllm -- python3 -c 'import os; os.kill(1, 15)'
  make cluster-down
"""


def main() -> int:
    """Install, deploy, wait, and say what can be looked at."""
    if not (FOLDER / "kubeconfig").exists():
        sys.stderr.write("there is no cluster here: run make cluster\n")
        return 1
    try:
        with Access(FOLDER / "kubeconfig", programs(), FOLDER) as cluster:
            address = run(cluster)
    except BoxError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(_WHAT_NOW.format(address=address))
    return 0


def run(cluster: Access) -> str:
    """Bring all of it up; returns the address of vLLM's pod.

    Raises:
        BoxError: something of it did not become ready in time.
    """
    if not vllm_pods.FOLDER.is_dir():
        raise BoxError("vLLM's packages for the pods are not there: run make vllm-pod")
    vllm_pods.write_model()
    repository, _, tag = KVCELLAR_IMAGE.rpartition(":")
    cluster.apply(*(_namespace(name) for name in ("kvcellar-system", NAMESPACE)))
    cluster.helm(
        *("upgrade", "--install", "kvcellar", str(ROOT / "charts" / "kvcellar")),
        *("--namespace", "kvcellar-system", "--set", f"image.repository={repository}"),
        *("--set", f"image.tag={tag}", "--wait", "--timeout=180s"),
        timeout_s=200,
    )
    cluster.apply(*vllm_pods.volume("vllm", NAMESPACE), _profile(), _deployment())
    done = cluster.kubectl(
        *("rollout", "status", "deployment/vllm", "--namespace", NAMESPACE),
        f"--timeout={_READY_S:g}s",
        check=False,
        timeout_s=_READY_S + 10,
    )
    if done.returncode != 0:
        log = ("logs", "deploy/vllm", "--container=vllm", "--namespace", NAMESPACE, "--tail=30")
        said = cluster.kubectl(*log, check=False).stdout
        raise BoxError(
            f"vLLM did not become ready within {_READY_S:g} s; its log ends with\n{said}"
        )
    return until(lambda: _address(cluster), "vLLM's pod has an address")


def _address(cluster: Access) -> str:
    pods = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods", labelSelector="app=vllm")
    running = [each for each in pods["items"] if "deletionTimestamp" not in each["metadata"]]
    return str(running[0]["status"].get("podIP", "")) if running else ""


def _namespace(name: str) -> JsonObject:
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": _RESTRICTED},
    }


def _profile() -> JsonObject:
    return {
        "apiVersion": "kvcellar.dev/v1alpha1",
        "kind": "OffloadProfile",
        "metadata": {"name": "default", "namespace": NAMESPACE},
        "spec": {"capacity": "64Mi"},
    }


def _deployment() -> JsonObject:
    labels = {"app": "vllm"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm", "namespace": NAMESPACE},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "Recreate"},
            "template": vllm_pods.template("vllm", labels),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
