"""The pod that a runtime is, as the Kubernetes API takes it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.runtimes.command import CannotPass, exports
from rollout.runtimes.route import named
from rollout.task import RuntimeSpec

INSIDE = "/run/verbatim"
"""A volume of the pod's own that whoever runs in it can write."""
CONTAINER = "runtime"
LABEL = "verbatim.runtime"
"""The runtime's name; by which pods of runtimes are found again."""
NETWORK_LABEL = "verbatim.network"
"""proxy or full: by which a NetworkPolicy chooses the pods that it holds."""
PROXY_LABEL = "verbatim.proxy"
"""Which proxy a pod may reach, where the node makes the policy."""
MANAGED = {"app.kubernetes.io/managed-by": "verbatim"}
_VOLUME = "verbatim"
_KEPT = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Nobody moves a rollout to another machine to save one: it would have to begin again."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The pod that a node runs in."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Way:
    """To the proxy: its name, or its address, the addresses that stand for it, and its port."""

    host: str
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of a pod does not come from the task's own spec. `way` None: it has the whole network. `user` None: whom the image says.
    `owner` must be in the same namespace: with it the pod goes when that is gone."""

    way: Way | None
    owner: Owner | None
    service_account: str | None
    user: int | None
    deadline_seconds: int


def labels(spec: RuntimeSpec, name: str) -> dict[str, str]:
    return {**MANAGED, LABEL: name, NETWORK_LABEL: spec.network}


def manifest(spec: RuntimeSpec, name: str, labels: Mapping[str, str], surroundings: Surroundings) -> dict[str, Any]:
    """Of a pod that lives for `deadline_seconds` at most."""
    metadata: dict[str, Any] = {"name": name, "labels": dict(labels), "annotations": _KEPT}
    if (owner := surroundings.owner) is not None:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}]
    whole: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": surroundings.deadline_seconds,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(surroundings.user),
        "containers": [_container(spec, surroundings.user)],
        "volumes": [{"name": _VOLUME, "emptyDir": {}}],
        **(_names(surroundings.way) if surroundings.way is not None else {}),
    }
    if surroundings.service_account is not None:
        whole["serviceAccountName"] = surroundings.service_account
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}


def _names(way: Way) -> dict[str, Any]:
    """The proxy's name is known without any name service: with one, a pod could tell the world what it likes."""
    known: dict[str, Any] = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    if named(way.host) is not None:
        known["hostAliases"] = [{"ip": address, "hostnames": [way.host]} for address in way.addresses]
    return known


def _container(spec: RuntimeSpec, user: int | None) -> dict[str, Any]:
    # What is asked for is what is given: a rollout is as fast on a full machine as on an empty one.
    amounts = {"cpu": f"{max(1, round(spec.cpus * 1000))}m", "memory": f"{spec.memory_mb}Mi"}
    if spec.disk_mb is not None:
        amounts["ephemeral-storage"] = f"{spec.disk_mb}Mi"
    # A user that is not root has no use for capabilities; root in an image needs the usual ones to install anything.
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


def _pod_security(user: int | None) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user is not None:
        security |= {"runAsNonRoot": user != 0, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return security


# What runs in a pod's container beside the commands themselves: shell scripts, of what every image has with a shell and coreutils or
# busybox.
#
# A command comes in as bytes on stdin, of which the first are a script that sets the variables and becomes the command, and the rest the
# command's stdin: so neither stands in the address of the request, in logs of it, or in a list of processes. How many bytes there are is
# told before: the end of a stream need not be passed on, as version 4 of the exec protocol cannot. The shell that takes them stays the
# command's parent, ends what it leaves running and ends with its exit code.
#
# In the folder `inside` a command has `ID.in` until it starts, `ID.pid` (that shell's) while it runs, and `ID.dead` once it is to end.


MARK = "VERBATIM_EXEC"
"""A variable of every command: which one it is, to tell the processes of several apart."""
ENDED = b"\x04"
"""The last byte of stdout, after one that says that the command was started: what comes without them comes from no command, or from one
that somebody ended with its shell."""
_WORD_BYTES = 1 << 17
"""What Linux takes as one argument or variable, with the null byte at its end."""

FIRST = """
trap 'exit 0' TERM
while :; do sleep 3600 & echo $! > "$0/first"; wait $!; done
"""
"""The container's first process; $0 is the folder."""

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
"""`left` lists what the command `id` started and still runs, by parents and by its mark, without its own shell; with it what has lost
both, when no other command runs. A process that is just becoming another program has neither variables nor arguments to be seen: with
`unsure` one is told of whose mark is not known yet. `end` kills until nothing is left."""

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
"""Arguments: the folder, the command's id, how many bytes its script has, and how many come in all."""

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
"""Prints the home and the workdir, which are there then. Arguments: the folder, the workdir that is asked for or nothing, and the usual
one, in place of which a user that may not make it gets one in the folder."""


def script(place: str, argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    """What sets the variables and becomes the command, in the folder `place`. Raises `CannotPass`."""
    if not argv or any("\0" in word for word in argv):
        raise CannotPass("the command is empty or holds a null byte")
    lines = [*exports(env), f"cd {shlex.quote(place)} || exit 126", f"exec {shlex.join(argv)}"]
    for word in (*argv, *(f"{name}={value}" for name, value in env.items())):
        if len(os.fsencode(word)) >= _WORD_BYTES:
            raise CannotPass(f"the command cannot be passed on: {word[:40]!r}... is too long for an argument or a variable")
    return os.fsencode("\n".join(lines))
