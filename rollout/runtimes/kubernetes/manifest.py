"""The pod of a runtime as the Kubernetes API takes it, and the shell scripts that run in its container."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.tasks import RuntimeSpec
from rollout.runtimes.command import CannotPass, check_argv, render_exports
from rollout.runtimes.passage import host_name
from rollout.runtimes.settings import PodFields

INSIDE = "/run/verbatim"
"""A volume of the pod, writable for every user in it."""
CONTAINER = "runtime"
LABEL = "verbatim.runtime"
"""Holds the runtime's name; pods of runtimes are found by it."""
NETWORK_LABEL = "verbatim.network"
"""proxy or full; NetworkPolicies select pods by it."""
PROXY_LABEL = "verbatim.proxy"
"""Which proxy the pod may reach, if the node makes the policy."""
MANAGED = {"app.kubernetes.io/managed-by": "verbatim"}
_VOLUME = "verbatim"
_ANNOTATIONS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Neither autoscaler may move a rollout to save a machine: it would have to start over."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The pod that a node runs in."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ResolvedProxy:
    """`host` is a name or an address, `addresses` what it resolves to."""

    host: str
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What does not come from the task's spec. `proxy` None: the pod has the whole network. `user` None: the image's own. `owner` must be
    in the same namespace; the cluster removes the pod when the owner is gone. `seccomp_profile` is a file of the cluster's machines, None
    the cluster's default filter."""

    proxy: ResolvedProxy | None
    owner: Owner | None
    service_account: str | None
    user: int | None
    deadline_seconds: int
    fields: PodFields
    seccomp_profile: str | None


def make_labels(spec: RuntimeSpec, name: str) -> dict[str, str]:
    return {**MANAGED, LABEL: name, NETWORK_LABEL: spec.network}


def make_manifest(spec: RuntimeSpec, name: str, labels: Mapping[str, str], settings: PodSettings) -> dict[str, Any]:
    """A pod that lives for at most `deadline_seconds`."""
    fields = settings.fields.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    annotations = {**_ANNOTATIONS, **fields.pop("annotations", {})}
    metadata: dict[str, Any] = {"name": name, "labels": dict(labels), "annotations": annotations}
    if (owner := settings.owner) is not None:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": settings.deadline_seconds,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _make_pod_security(settings.user, settings.seccomp_profile),
        "containers": [_make_container(spec, settings.user)],
        "volumes": [{"name": _VOLUME, "emptyDir": {}}],
        **(_make_dns(settings.proxy) if settings.proxy is not None else {}),
        **fields,
    }
    if settings.service_account is not None:
        pod["serviceAccountName"] = settings.service_account
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _make_dns(proxy: ResolvedProxy) -> dict[str, Any]:
    """The pod knows the proxy's name and has no name service, through which it could send data anywhere."""
    dns: dict[str, Any] = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    if host_name(proxy.host) is not None:
        dns["hostAliases"] = [{"ip": address, "hostnames": [proxy.host]} for address in proxy.addresses]
    return dns


def _make_container(spec: RuntimeSpec, user: int | None) -> dict[str, Any]:
    # Requests equal limits, so a rollout is as fast on a full machine as on an empty one.
    amounts = {"cpu": f"{max(1, round(spec.cpus * 1000))}m", "memory": f"{spec.memory_mb}Mi"}
    if spec.disk_mb is not None:
        amounts["ephemeral-storage"] = f"{spec.disk_mb}Mi"
    # A user other than root needs no capabilities; root in an image needs the usual ones to install anything.
    dropped = ["ALL"] if user else ["NET_RAW"]
    return {
        "name": CONTAINER,
        "image": spec.image,
        "command": ["/bin/sh", "-c", FIRST, INSIDE],
        "workingDir": "/",
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": dropped}},
        "volumeMounts": [{"name": _VOLUME, "mountPath": INSIDE}],
    }


def _make_pod_security(user: int | None, profile: str | None) -> dict[str, Any]:
    own = {"type": "Localhost", "localhostProfile": profile}
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"} if profile is None else own}
    if user is not None:
        security |= {"runAsNonRoot": user != 0, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return security


# The scripts use what every image with a shell has: coreutils or busybox.
#
# A command arrives on stdin: first a script that sets the variables and becomes the command, then the command's stdin. So neither shows in
# the request's address, in its logs or in a list of processes. Their sizes are announced first, because version 4 of the exec protocol
# cannot signal the end of a stream. The shell that reads them stays the command's parent, ends what the command leaves running, and exits
# with its exit code.
#
# The folder `inside` holds for each command ID.in until it starts, ID.pid (the pid of that shell) while it runs, and ID.dead once it is to
# be killed.


MARK = "VERBATIM_EXEC"
"""A variable that names the command that a process belongs to."""
ENDED = b"\x04"
"""The last byte of stdout, after a first one that says that the command started. Output without both comes from no command, or from one
whose shell was killed."""
_WORD_BYTES = 1 << 17
"""Linux's limit for one argument or variable, including its null byte."""

FIRST = """
trap 'exit 0' TERM
while :; do sleep 3600 & echo $! > "$0/first"; wait $!; done
"""
"""The container's first process; $0 is the folder."""


def make_script(workdir: str, argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    """Shell lines that set the variables and become the command. Raises `CannotPass`."""
    check_argv(argv)
    lines = [*render_exports(env), f"cd {shlex.quote(workdir)} || exit 126", f"exec {shlex.join(argv)}"]
    for word in (*argv, *(f"{name}={value}" for name, value in env.items())):
        if len(os.fsencode(word)) >= _WORD_BYTES:
            raise CannotPass(f"the command cannot be passed on: {word[:40]!r}... is too long for an argument or a variable")
    return os.fsencode("\n".join(lines))


_LEFT = r"""
environment() {
    own=$({ tr '\0' '\n' < "/proc/$1/environ"; } 2>/dev/null)
}
marked() {
    environment "$1"
    if [ -z "$own" ] && length=$({ wc -c < "/proc/$1/cmdline"; } 2>/dev/null); then
        if [ "$length" -eq 0 ]; then unsure=yes; else environment "$1"; fi
    fi
    case "
$own
" in *"
VERBATIM_EXEC=$id
"*) return 0 ;; esac
    return 1
}
left() {
    found='' mine='' first='' pairs='' alone=yes unsure=''
    [ -e "$inside/$id.pid" ] && read -r mine < "$inside/$id.pid"
    [ -n "$mine" ] || return 0
    [ -e "$inside/first" ] && read -r first < "$inside/first"
    for other in "$inside"/*.pid; do
        [ "$other" = "$inside/$id.pid" ] && continue
        number=''
        { read -r number < "$other"; } 2>/dev/null
        [ -n "$number" ] && [ -d "/proc/$number" ] && alone=''
    done
    for status in /proc/[0-9]*/status; do
        pid=${status#/proc/} state='' parent=''
        pid=${pid%/status}
        { while read -r key value rest; do
            case $key in State:) state=$value ;; PPid:) parent=$value; break ;; esac
        done < "$status"; } 2>/dev/null
        [ -z "$parent" ] || [ "$state" = Z ] || [ "$pid" = "$$" ] || [ "$pid" = "$first" ] || pairs="$pairs $pid:$parent"
    done
    found=" $mine "
    for pair in $pairs; do
        [ "${pair#*:}" = 1 ] || continue
        if [ -n "$alone" ] || marked "${pair%:*}"; then found="$found${pair%:*} "; fi
    done
    more=yes
    while [ -n "$more" ]; do
        more=''
        for pair in $pairs; do
            case $found in *" ${pair%:*} "*) continue ;; esac
            case $found in *" ${pair#*:} "*) found="$found${pair%:*} " more=yes ;; esac
        done
    done
    found=${found#" $mine "}
}
end() {
    tries=0
    while left; [ -n "$found$unsure" ] && [ "$tries" -lt 200 ]; do
        [ -z "$found" ] || kill -KILL $found 2>/dev/null
        tries=$((tries + 1))
        sleep 0.05 2>/dev/null || sleep 1
    done
}
"""
"""`left` lists the running processes that the command `id` started, by parent and by mark, without the command's own shell; if no other
command runs, processes that lost both count too. A process in the middle of an exec shows neither variables nor arguments: `unsure` says
that there is one whose mark is not known yet. `end` kills until nothing is left."""

RUN = (
    _LEFT
    + r"""
inside=$0 id=$1 size=$2 whole=$3 mask=$(umask)
umask 077
head -c "$whole" > "$inside/$id.in" || { rm -f "$inside/$id.in"; exit 1; }
[ "$(wc -c < "$inside/$id.in")" -eq "$whole" ] || { rm -f "$inside/$id.in"; echo "its input broke off" >&2; exit 1; }
exec 3< "$inside/$id.in"
rm -f "$inside/$id.in"
echo $$ > "$inside/$id.pid" || exit 1
umask "$mask"
if [ -e "$inside/$id.dead" ]; then rm -f "$inside/$id.pid"; exit 137; fi
printf '\006'
exec 5>&2 2>/dev/null
( eval "$(dd bs="$size" count=1 2>/dev/null)" ) <&3 3<&- 2>&5 5>&-
code=$?
end
rm -f "$inside/$id.pid" "$inside/$id.dead"
printf '\004'
exit $code
"""
)
"""Arguments: the folder, the command's id, the bytes of its script, and all bytes of stdin."""

KILL = (
    _LEFT
    + r"""
inside=$0 id=$1
: > "$inside/$id.dead"
if [ "$2" = KILL ]; then end; else left; [ -z "$found" ] || kill -"$2" $found; fi
"""
)
"""Arguments: the folder, the command's id, and TERM or KILL."""

PLACES = r"""
usable() { mkdir -p "$1" 2>/dev/null; [ -d "$1" ] && [ -w "$1" ]; }
home=$HOME
if [ -z "$home" ] || [ "$home" = / ]; then home=/root; fi
usable "$home" || home=$0/home
workdir=${1:-$2}
usable "$workdir" || { [ -z "$1" ] && workdir=$0/workspace; }
usable "$home" && usable "$workdir" || { echo "the image's user $(id -u) cannot write $workdir" >&2; exit 1; }
printf '%s\n%s\n' "$home" "$workdir"
"""
"""Makes and prints the home and the workdir. Arguments: the folder, the requested workdir or nothing, and the default one; a user who may
not create the default gets one in the folder."""
