"""Processes that have a region of vLLM's own class, told what to do by one that has imported it once.

A program, run inside a sandbox: `region_class.py FD`. It reads a request a line from stdin and writes an
answer a line to FD; what vLLM prints goes to stdout. Requests, as JSON:

    {"open": engine_id, "chunks": n, "rank": r or null, "row": bytes, "slot": bytes, ...}
        fork a process that makes or joins the region and stays; answers {"pid", "creator", "inode"}, or
        {"pid", "error"}. More keys: "write": fill the rank's view with this byte; "unlink": remove the
        name afterwards; "bare": only take the name, as vLLM's first system call does, and set this size
    {"kill": pid}
        SIGKILL it and wait; answers {"killed": pid}
"""

import json
import os
import signal
import sys
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def _bare(path: str, size_bytes: int) -> dict[str, Any]:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    if size_bytes:
        os.ftruncate(fd, size_bytes)
    return {"creator": True, "inode": os.fstat(fd).st_ino}


def _open(request: dict[str, Any]) -> tuple[dict[str, Any], object]:
    path = f"/dev/shm/vllm_offload_{request['open']}.mmap"
    if "bare" in request:
        return _bare(path, request["bare"]), None
    region = SharedOffloadRegion(
        request["open"], request["chunks"], request["rank"], request["row"], request["slot"]
    )
    if "write" in request:
        region.create_next_worker_view(request["slot"]).fill_(request["write"])
    if request.get("unlink"):
        os.unlink(path)
    assert region.fd is not None
    answer = {"creator": region._creator, "inode": os.fstat(region.fd).st_ino}
    if request["rank"] is None:  # the scheduler's side of a region with tiers
        rows = region.create_kv_memoryview()
        answer["columns"] = [rows[row, 0] for row in range(request["chunks"])]
        answer["others"] = [rows[row, request["slot"]] for row in range(request["chunks"])]
        rows.release()
    return answer, region


def _child(request: dict[str, Any], answers: int) -> None:
    kept: object = None
    try:
        answer, kept = _open(request)
    except (OSError, TimeoutError) as error:
        answer = {"error": repr(error)}
    os.write(answers, (json.dumps({"pid": os.getpid(), **answer}) + "\n").encode())
    if kept is not None or "error" not in answer:
        signal.pause()


def main() -> None:
    """Serve until stdin ends."""
    answers = int(sys.argv[1])
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "kill" in request:
            os.kill(request["kill"], signal.SIGKILL)
            os.waitpid(request["kill"], 0)
            children.discard(request["kill"])
            os.write(answers, (json.dumps({"killed": request["kill"]}) + "\n").encode())
            continue
        pid = os.fork()
        if pid == 0:
            _child(request, answers)
            os._exit(0)
        children.add(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


main()
