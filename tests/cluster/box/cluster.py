"""A Kubernetes control plane of one's own: real programs on this machine, gone after use.

With a node (`real_node`) it runs pods. Without one tests make the nodes and set the status of pods themselves
(`simulated`).

A cluster writes down what it makes before it makes it (`record`). While its maker lives, `stop`
removes it. A *keeper*, a process of its own that holds a pipe to the maker, does so if the maker
dies in whatever way. A cluster that is left running on purpose has none.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.box import cgroups, real_node
from tests.cluster.box.access import Access
from tests.cluster.box.commands import Files, audit_log, command
from tests.cluster.box.errors import ApiError, BoxError
from tests.cluster.box.processes import ProcessId
from tests.cluster.box.programs import programs
from tests.cluster.box.record import Record, to_remove
from tests.cluster.box.settings import Node, Settings

ROOT = Path(__file__).resolve().parents[3]

_START_DEADLINE_S = 180.0
"""Measured on 2 cores that ten other processes want: 7 to 12 s."""

_STARTS = 5
"""How often a program may be started until the cluster is: on a machine that is busy for long, some of them
give up waiting for the API server, and are started again as a kubelet or an init would."""

_NOT_AGAIN = ("etcd", "kube-apiserver", real_node.HOLDER)
"""Those that others lean on: if one of them ends, the start has failed."""

_CLIENTS = ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
"""Those that watch the API server."""


class Cluster(Access):
    """One cluster: `start` and `stop` it, or take `running` as a context."""

    def __init__(self, settings: Settings, folder_of_programs: Path) -> None:
        super().__init__(settings.folder / "kubeconfig", folder_of_programs, settings.folder)
        self.settings = settings
        self.folder_of_programs = folder_of_programs
        self._record = Record(settings.folder)
        self._files: Files | None = None
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        self._keeper: subprocess.Popen[bytes] | None = None
        self._node: real_node.RunningNode | None = None

    @classmethod
    @contextlib.contextmanager
    def running(cls, settings: Settings) -> "Iterator[Cluster]":
        """A cluster for the length of a block."""
        cluster = cls(settings, programs())
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()

    # --- start and stop --------------------------------------------------------------------------

    def start(self, *, keep_running: bool = False) -> None:
        """Start it and wait until it takes pods; after an error nothing is left of it.

        Args:
            keep_running: leave it running when this process ends.

        Raises:
            BoxError: the folder exists already, or a program ended or was not ready in time.
        """
        try:
            self.settings.folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise BoxError(f"{self.settings.folder} exists: it may be another cluster's") from None
        try:
            self.settings.logs.mkdir(parents=True, exist_ok=True)
            self._record.save()
            if not keep_running:
                self._start_keeper()
            self._make_bridge()
            self._files = Files.write(self.settings)
            self._start_programs()
            if self.settings.node is not None:
                self._start_node(self.settings.node)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process and remove every trace but the logs; it may be stopped twice."""
        self.close()
        self._record.remove_all()
        for process in self._own.values():
            process.wait()
        if self._keeper is not None:
            # At the end of the pipe it finds nothing to do.
            self._keeper.communicate()
            self._keeper = None

    # --- single programs -------------------------------------------------------------------------

    def start_program(self, program: str) -> None:
        """Start one of `CONTROL_PLANE`, or of the node's; also again, after `end_program`."""
        if self._files is None:
            raise BoxError("the cluster is not started")
        executable = str(self.folder_of_programs / program)
        place = self.settings.node
        if program in real_node.PROGRAMS and place is not None and self._files.node is not None:
            arguments = real_node.command(program, place, self._files.node, self._files.kubeconfigs)
            before = real_node.inside(place, self._record.processes[real_node.HOLDER].pid)
            self._run_program(program, [*before, executable, *arguments])
        else:
            self._run_program(program, [executable, *command(program, self.settings, self._files)])

    def _run_program(self, name: str, argv: list[str]) -> None:
        path = f"{self.folder_of_programs}:{os.environ['PATH']}:/usr/sbin:/sbin"
        with (self.settings.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                cwd=self.settings.folder,
                env=os.environ | {"PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # An interrupt of the terminal is for the maker, which then stops the cluster.
                start_new_session=True,
            )
        self._own[name] = process
        self._record.processes[name] = ProcessId.of(process.pid)
        self._record.save()

    def end_program(self, program: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End one of them, as an outage does; returns when it is gone."""
        if not self._record.processes[program].end(number, deadline_s=60.0):
            raise BoxError(f"{program} did not end on {number.name} within 60 s")
        self._own.pop(program).wait()

    def wait_until_ready(self) -> None:
        """Wait until the API server answers that it is ready."""
        self._wait(self._is_ready, "the API server is not ready")

    def restart_clients(self) -> None:
        """Start everything afresh that watches the API server, after that was away.

        Their watches wait ever longer between two tries: 25 s after the last one that failed, they may
        need another 50 s to notice that it is back.
        """
        for program in [each for each in self._own if each in _CLIENTS]:
            self.end_program(program, signal.SIGTERM)
            self.start_program(program)
        place = self.settings.node
        if place is not None:
            self._wait(
                lambda: self._has_its_pods(place), "the kubelet has not found its pods again"
            )

    @property
    def node(self) -> real_node.RunningNode:
        """Its node.

        Raises:
            BoxError: it has none.
        """
        if self._node is None:
            raise BoxError("the cluster has no node")
        return self._node

    # --- what it shows ---------------------------------------------------------------------------

    def audit(self, user: str | None = None) -> Iterator[dict[str, Any]]:
        """The requests answered so far, oldest first; of one user, or of all.

        A ServiceAccount's name as a user is ``system:serviceaccount:<namespace>:<name>``.
        """
        with audit_log(self.settings).open() as lines:
            # The last line may be half written.
            for event in (json.loads(line) for line in lines if line.endswith("\n")):
                if user is None or event["user"]["username"] == user:
                    yield event

    def as_user(self, name: str, *groups: str) -> Access:
        """The cluster as another user sees it, with a client certificate of that name and groups."""
        if self._files is None:
            raise BoxError("the cluster is not started")
        label = f"user-{time.monotonic_ns()}"
        pair = self._files.authority.client(label, name, list(groups))
        files = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        return self.as_user_with(files, label)

    def pids(self) -> dict[str, int]:
        """The processes, by program."""
        return {name: process.pid for name, process in self._record.processes.items()}

    def traces(self) -> list[str]:
        """What there is of the cluster on this machine, in words; empty once it is stopped."""
        return self._record.traces()

    # --- inside start ----------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        with (self.settings.logs / "keeper.log").open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.box", "keep", self.settings.folder],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _make_bridge(self) -> None:
        bridge = self.settings.bridge
        if bridge is None:
            return
        self._record.bridge = bridge.name
        self._record.save()
        for arguments in (
            f"link add {bridge.name} type bridge",
            f"address add {bridge.interface} dev {bridge.name}",
            f"link set {bridge.name} up",
            # No packet to a Service may leave the machine, kube-proxy or not.
            f"route add {self.settings.service_subnet} dev {bridge.name}",
        ):
            done = subprocess.run(
                ["ip", *arguments.split()], capture_output=True, text=True, timeout=10, check=False
            )
            if done.returncode != 0:
                raise BoxError(f"ip {arguments}: {done.stderr.strip()} (a bridge needs root)")

    def _start_programs(self) -> None:
        self.start_program("etcd")
        self.start_program("kube-apiserver")
        # The others may do nothing before the API server has made their roles: asking too early, they
        # are refused, and ask again seconds later.
        self.wait_until_ready()
        self.start_program("kube-controller-manager")
        self.start_program("kube-scheduler")
        # Made by the controller manager; without it the API server takes no pod.
        self._wait(
            lambda: self._exists("/api/v1/namespaces/default/serviceaccounts/default"),
            "the controller manager has made no ServiceAccount",
        )

    def _start_node(self, place: Node) -> None:
        files = self._files.node if self._files else None
        if files is None:
            raise BoxError("the cluster is not started")
        self._record.group, self._record.link = place.name, place.link
        self._record.folders = to_remove(real_node.COVERED)
        self._record.save()
        for each in real_node.COVERED:
            Path(each).mkdir(parents=True, exist_ok=True)
        cgroups.make(place.name)
        self._run_program(real_node.HOLDER, list(real_node.holder(place, files)))
        self._wait(files.ready.exists, "the node has no namespaces")
        holder_pid = self._record.processes[real_node.HOLDER].pid
        real_node.connect(self.settings, place, holder_pid)
        self._node = real_node.RunningNode(place, files, self.folder_of_programs, holder_pid)
        self.start_program("containerd")
        self._wait(self._node.runtime_answers, "containerd does not answer")
        self.start_program("kubelet")
        self.start_program("kube-proxy")
        self._wait(lambda: self._takes_pods(place), "the node is not ready")

    def _has_its_pods(self, place: Node) -> bool:
        """Whether the kubelet knows every pod of its node: until then it lets nobody into one."""
        bound = self.api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={place.name}")
        try:
            known = self.api.get(f"/api/v1/nodes/{place.name}/proxy/pods")
        except ApiError:  # it does not listen yet
            return False
        uids = [
            {each["metadata"]["uid"] for each in pods["items"] or ()} for pods in (bound, known)
        ]
        return uids[0] <= uids[1]

    def _takes_pods(self, place: Node) -> bool:
        if not self._exists(f"/api/v1/nodes/{place.name}"):
            return False
        found = self.api.get(f"/api/v1/nodes/{place.name}")
        conditions = {each["type"]: each["status"] for each in found["status"]["conditions"]}
        return conditions.get("Ready") == "True" and not found["spec"].get("taints")

    def _wait(self, look: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        starts: Counter[str] = Counter()
        while not look():
            for program, process in list(self._own.items()):
                if process.poll() is not None:
                    starts[program] += 1
                    if program in _NOT_AGAIN or starts[program] == _STARTS:
                        raise BoxError(f"{program} ended by itself:\n{self._end_of_log(program)}")
                    self.start_program(program)
            if time.monotonic() > deadline:
                logs = "\n".join(self._end_of_log(program) for program in self._own)
                raise BoxError(f"{complaint} after {_START_DEADLINE_S} s:\n{logs}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return self.api.raw("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def _exists(self, path: str) -> bool:
        try:
            self.api.get(path)
        except ApiError:
            return False
        return True

    def _end_of_log(self, program: str) -> str:
        path = self.settings.logs / f"{program}.log"
        lines = path.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"--- {path}", *lines])
