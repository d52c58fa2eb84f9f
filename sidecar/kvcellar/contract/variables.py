"""The environment variables: their names, and which names are nobody's."""

import re

ENV_PREFIX = "KVCELLAR_"
ENV_ROOT = "KVCELLAR_ROOT"
ENV_DIR = "KVCELLAR_DIR"
ENV_OWNER = "KVCELLAR_OWNER"
ENV_ENGINE_ID = "KVCELLAR_ENGINE_ID"
ENV_ENGINES = "KVCELLAR_ENGINES"
ENV_CAPACITY = "KVCELLAR_CAPACITY"
ENV_CONTENTS = "KVCELLAR_CONTENTS"
ENV_RETENTION = "KVCELLAR_RETENTION"
ENV_MODE = "KVCELLAR_MODE"
ENV_ON_FAILURE = "KVCELLAR_ON_FAILURE"
ENV_ATTACH_TIMEOUT = "KVCELLAR_ATTACH_TIMEOUT"
ENV_PIN = "KVCELLAR_PIN"
ENV_SETTLE_THREADS = "KVCELLAR_SETTLE_THREADS"
ENV_HUGE_PAGES = "KVCELLAR_HUGE_PAGES"
ENV_JANITOR = "KVCELLAR_JANITOR"
ENV_POD_UID = "KVCELLAR_POD_UID"
ENV_POD_MEMORY_LIMIT = "KVCELLAR_POD_MEMORY_LIMIT"
ENV_DESIRED_FILE = "KVCELLAR_DESIRED_FILE"
ENV_VLLM_UNTESTED = "KVCELLAR_VLLM_UNTESTED"
ENV_HTTP_HOST = "KVCELLAR_HTTP_HOST"
ENV_HTTP_PORT = "KVCELLAR_HTTP_PORT"
ENV_LOG_LEVEL = "KVCELLAR_LOG_LEVEL"

ENV_NAMES = frozenset(
    {
        ENV_ROOT,
        ENV_DIR,
        ENV_OWNER,
        ENV_ENGINE_ID,
        ENV_ENGINES,
        ENV_CAPACITY,
        ENV_CONTENTS,
        ENV_RETENTION,
        ENV_MODE,
        ENV_ON_FAILURE,
        ENV_ATTACH_TIMEOUT,
        ENV_PIN,
        ENV_SETTLE_THREADS,
        ENV_HUGE_PAGES,
        ENV_JANITOR,
        ENV_POD_UID,
        ENV_POD_MEMORY_LIMIT,
        ENV_DESIRED_FILE,
        ENV_VLLM_UNTESTED,
        ENV_HTTP_HOST,
        ENV_HTTP_PORT,
        ENV_LOG_LEVEL,
    }
)
"""Every variable that a process of kvcellar reads; another `KVCELLAR_*` stops the start by its name."""

_IGNORED_ENV = re.compile(
    r"KVCELLAR_(TEST_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT|SERVICE_PORT_.*|PORT|PORT_.*))"
)


def unknown_variables(names: "set[str] | frozenset[str]") -> list[str]:
    """The `KVCELLAR_*` names that nothing reads, sorted.

    `KVCELLAR_TEST_*` and the shapes of Kubernetes service links (`*_SERVICE_HOST`, `*_SERVICE_PORT*`,
    `*_PORT`, `*_PORT_*`) are let pass: the kubelet sets the latter in every pod of a namespace that has
    a Service named `kvcellar...`.
    """
    return sorted(
        name
        for name in names
        if name.startswith(ENV_PREFIX)
        and name not in ENV_NAMES
        and not _IGNORED_ENV.fullmatch(name)
    )
