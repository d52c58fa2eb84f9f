"""Under which user and group the sidecar runs, so that engine and sidecar can both open the region. Pure.

The sidecar makes a directory of mode 02750 and files of mode 0660 in it. An engine can open them if the
pod has an fsGroup (the volume then hands it down), if it runs as the same user, or if the sidecar's
primary group is one of the engine's own. The first that holds is taken; where none does, a group is
added to the pod's supplementalGroups, which unlike an fsGroup changes the owner of no volume.

The janitor can reclaim files of stock vLLM only as their owner, so the sidecar takes the engine's user
where the pod says one that is not root.
"""

from dataclasses import dataclass

from kvcellar_operator.pods import Container, Pod, child, run_as_group, run_as_user, spec_of
from kvcellar_operator.profiles import Profile
from kvcellar_operator.settings import InjectSettings

_NOBODY = 65532
"""For a pod whose containers are root by its own words, where the cluster is to choose: it would not."""


@dataclass(frozen=True, slots=True)
class Identity:
    """User and group of our containers.

    Attributes:
        user: None leaves it to the image or the cluster.
        group: primary group; None leaves it to the image or the pod.
        added_group: to be added to the pod's supplementalGroups; None if none is needed.
    """

    user: int | None
    group: int | None
    added_group: int | None


def decide(
    pod: Pod, engines: list[Container], profile: Profile, settings: InjectSettings
) -> Identity:
    """Choose user and group for the engines of a pod."""
    users = {run_as_user(pod, engine) for engine in engines}
    groups = {run_as_group(pod, engine) for engine in engines}
    security = child(spec_of(pod), "securityContext")
    engine_user = _only(users)
    user = _user(engine_user, security.get("runAsUser"), profile, settings)
    group = profile.sidecar.run_as_group
    if group is None:
        group = _only(groups)
    has_common_owner = engine_user is not None and engine_user == user
    if security.get("fsGroup") is not None or has_common_owner:
        return Identity(user, group, None)
    supplemental = [g for g in security.get("supplementalGroups") or [] if isinstance(g, int)]
    if group is None:
        group = supplemental[0] if supplemental else settings.shared_group
    is_shared = group in supplemental or groups == {group}
    return Identity(user, group, None if is_shared else group)


def _user(
    engine_user: int | None, pod_user: object, profile: Profile, settings: InjectSettings
) -> int | None:
    if profile.sidecar.run_as_user is not None:
        return profile.sidecar.run_as_user
    if engine_user is not None:
        return engine_user
    if settings.run_as_user is None and pod_user == 0:
        return _NOBODY
    return settings.run_as_user


def _only(ids: set[int | None]) -> int | None:
    """The one id that all have; None if it is unknown, root, or not the same for all."""
    return next(iter(ids)) or None if len(ids) == 1 else None
