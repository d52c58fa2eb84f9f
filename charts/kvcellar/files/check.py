"""Is the webhook of kvcellar trusted, and does it inject? `helm test` runs this in a pod.

Standard library only. Arguments: name of the MutatingWebhookConfiguration, namespace to try in.
Nothing is created: the pod is a dry run.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path(
    os.environ.get("KVCELLAR_TEST_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount")
)
DEADLINE_S = float(os.environ.get("KVCELLAR_TEST_DEADLINE", "120"))
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "generateName": "kvcellar-test-",
        "labels": {"kvcellar.dev/inject": "true"},
    },
    "spec": {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "engine",
                "image": "engine",
                "command": ["vllm", "serve", "model"],
                "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    },
}


class NotYet(Exception):
    """What is still missing, in a sentence."""


def request(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the API server as the pod's ServiceAccount."""
    server = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    asked = urllib.request.Request(
        f"https://{server}{path}",
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/json",
        },
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(asked, timeout=30, context=context) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise NotYet(f"{method} {path}: {error.code} {error.read(400).decode()}") from error
    except OSError as error:
        raise NotYet(f"{method} {path}: {error}") from error


def check_crds() -> str:
    """Both kinds are served."""
    kinds = {each["kind"] for each in request("GET", "/apis/kvcellar.dev/v1alpha1")["resources"]}
    if not {"OffloadProfile", "OffloadRegion"} <= kinds:
        raise NotYet(f"the API server serves only {sorted(kinds)} of kvcellar.dev")
    return "the CRDs are served"


def check_trust(configuration: str) -> str:
    """Somebody has told the API server what certificate to trust."""
    group = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    found = request("GET", f"{group}/{configuration}")
    if not all(webhook["clientConfig"].get("caBundle") for webhook in found["webhooks"]):
        raise NotYet(f"{configuration} has no caBundle yet: look at the webhook's log")
    return f"{configuration} has its caBundle"


def check_injection(namespace: str) -> str:
    """A pod that opts in is injected, or skipped with a reason that is the user's own."""
    made = request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", POD)
    annotations = made["metadata"].get("annotations", {})
    skipped = annotations.get("kvcellar.dev/skipped", "")
    if skipped.startswith("ProfileDisabled"):
        return f"a pod was seen, and skipped as its profile asks: {skipped}"
    if skipped:
        raise NotYet(f"a pod was skipped: {skipped}")
    if "kvcellar.dev/injected" not in annotations:
        raise NotYet(f"a pod in namespace {namespace} was not seen by the webhook")
    return f"a pod in namespace {namespace} was injected: {annotations['kvcellar.dev/injected']}"


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(configuration: str, namespace: str) -> int:
    """Try until all is well, or the time is over; returns the exit status."""
    deadline_s = time.monotonic() + DEADLINE_S
    checks = [
        check_crds,
        lambda: check_trust(configuration),
        lambda: check_injection(namespace),
    ]
    while checks:
        try:
            say(checks[0]())
        except NotYet as error:
            if time.monotonic() > deadline_s:
                say(f"after {DEADLINE_S:.0f} s: {error}")
                return 1
            time.sleep(0.5)
        else:
            checks.pop(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
