#!/bin/bash
# `enroot start` without its namespaces: what a command in a container sees of the environment, and which options,
# mounts and variables are refused, by the source of enroot 4.1.2 (github.com/NVIDIA/enroot at 8ea147d), quoted below.
# An image is a file with the lines of its /etc/environment. Mounts go to $ENROOT_STAND_IN/mounts, and are not made:
# the command sees the folders of the host. Without -e, -m and -w there is nothing that lt uses.
set -euo pipefail

fail() { echo "[ERROR] $1" >&2; exit 1; }

[ "${1-}" = start ] || fail "Invalid command: ${1-}"
shift
mounts=() environ=()
while [ $# -gt 0 ]; do case $1 in
    -m | --mount) mounts+=("$2"); shift 2 ;;
    -e | --env) environ+=("$2"); shift 2 ;;
    -w | --rw) shift ;;
    -?*) echo "Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]" >&2; exit 1 ;;
    *) break ;;
esac; done
image=${1-}
shift
# runtime::start: a file that unsquashfs can read is an image; of others [[ "${rootfs}" == */* ]] is an error
[ -f "$image" ] || fail "Invalid argument: $image"

# runtime::start: [[ ! "${mount}" =~ ^[^[:space:]]+(:[^[:space:]]+)*$ ]]
# runtime::start: [[ ! "${env}" =~ ^[[:alpha:]_][[:alnum:]_]*(=|$) ]]
for one in ${mounts[@]+"${mounts[@]}"}; do
    [[ $one =~ ^[^[:space:]]+(:[^[:space:]]+)*$ ]] || fail "Invalid argument: $one"
done
for one in ${environ[@]+"${environ[@]}"}; do
    [[ $one =~ ^[[:alpha:]_][[:alnum:]_]*(=|$) ]] || fail "Invalid argument: $one"
done

scratch=$(mktemp -d)
file=$scratch/environment
# runtime::_do_environ: the image's /etc/environment, environ.d (10-terminal.env: TERM=${TERM}), then -e in its order
{ cat "$image"; echo "TERM=${TERM-}"; } >"$file"
for env in ${environ[@]+"${environ[@]}"}; do
    awk '{ print /=/ ? $0 : $0"="ENVIRON[$0] }' <<<"$env"
done >>"$file"
for _ in before after; do # _do_environ, and again at the end of _do_hooks: common::envfmt
    sed -i -e 's/^[[:space:]]\+//' \
        -e '/^#\|^$/d' \
        -e '/^[[:alpha:]_][[:alnum:]_]*=/!d' \
        -e '/^ENROOT_/d' \
        -e 's/^\([[:alpha:]_][[:alnum:]_]*\)=[\"\x27]\(.*\)[\"\x27][[:space:]]*$/\1=\2/' \
        "$file"
done

# runtime::_do_mounts_fini: tr ':' ' ' <<< "${mount}", a line of fstab. enroot-mount:
#   /src  /dst      -> /src  /dst none   rbind,x-create=auto
#   /src  /dst bind -> /src  /dst none   bind
for one in ${mounts[@]+"${mounts[@]}"}; do
    IFS=: read -r source target options <<<"$one"
    options=${options:-rbind,x-create=auto}
    [ -e "$source" ] || fail "enroot-mount: failed to mount: $source: No such file or directory"
    case ,$options, in *,rbind,* | *,bind,*) ;; *) fail "enroot-mount: failed to mount: $source at $target" ;; esac
    echo "$source $target $options" >>"$ENROOT_STAND_IN/mounts"
done

# enroot-switchroot, load_environment: clearenv(), then setenv() of each line; later ones win
inside=()
while IFS= read -r line; do inside+=("$line"); done <"$file"
rm -r "$scratch"
# enroot-switchroot, sys_login: setenv(..., 0), which leaves what is there; chdir(HOME)
add() { printf '%s\n' "${inside[@]}" | grep -q "^$1=" || inside+=("$1=$2"); }
add HOME /root
add SHELL /bin/bash
add USER root
add LOGNAME root
add PATH /usr/local/bin:/bin:/usr/bin
cd /root
# enroot-switchroot, sys_init: a shell, "-c" "exec \"$@\"", its name, the command; here it is no login shell, which
# would read the profile of the host
# shellcheck disable=SC2016 # for the shell inside
exec env -i "${inside[@]}" /bin/bash -c 'exec "$@"' bash "$@"
