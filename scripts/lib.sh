# shellcheck shell=bash
# shellcheck disable=SC2034 # many of these are for the scripts that source this
# What the scripts share: where things are, who runs them, what to say, and a record of what was made.
#
# Scripts run as a user with sudo, as root, or as root through sudo. What belongs to the person (builds, the
# API key, the context) is made as that person; what belongs to the machine (packages, the engine, images, the node)
# is made as root. Nothing here reads or changes more than its caller asks for.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Logs, pid files and the record of what was made. Inside the clone, so two clones do not mix theirs up.
UP=${BOXED_UP_DIR:-$ROOT/.up}
NODE_BIN=${BOXED_NODE_BIN:-$ROOT/bin/boxed-node}
CTL_BIN=${BOXED_CTL_BIN:-$ROOT/bin/boxedctl}
LISTEN=${BOXED_LISTEN:-127.0.0.1:8080}
DATA_DIR=${BOXED_DATA_DIR:-/var/lib/boxed}
KEY_FILE=${BOXED_API_KEY_FILE:-$DATA_DIR/admin.key}
ENDPOINT=http://$LISTEN

# boxed-node talks to this engine, whatever `docker context` the person at the keyboard has chosen.
export DOCKER_HOST=${DOCKER_HOST:-unix:///var/run/docker.sock}

# --- who -------------------------------------------------------------------------------------------------------

if [[ $EUID -eq 0 && -n ${SUDO_USER:-} && $SUDO_USER != root ]]; then
	PERSON=$SUDO_USER
	PERSON_HOME=$(getent passwd "$PERSON" | cut -d: -f6)
	PERSON_CONFIG=$PERSON_HOME/.config
else
	PERSON=$(id -un)
	PERSON_HOME=${HOME:-$(getent passwd "$PERSON" | cut -d: -f6)}
	PERSON_CONFIG=${XDG_CONFIG_HOME:-$PERSON_HOME/.config}
fi

# as_person runs a command as whoever typed `make`, also under `sudo make`.
as_person() {
	if [[ $EUID -eq 0 && $PERSON != root ]]; then
		runuser -u "$PERSON" -- env HOME="$PERSON_HOME" USER="$PERSON" PATH="$PATH" "$@"
	else
		env HOME="$PERSON_HOME" "$@"
	fi
}

# as_root runs a command as root. What sudo drops of the environment and matters here is passed on: the engine's address,
# PATH, proxies (packages and images come through them), and boxed's own settings.
as_root() {
	if [[ $EUID -eq 0 ]]; then
		"$@"
		return
	fi
	local name pass=(PATH="$PATH:/usr/sbin:/sbin")
	for name in DOCKER_HOST TMPDIR NO_COLOR {http,https,no,all}_proxy {HTTP,HTTPS,NO,ALL}_PROXY "${!BOXED_@}"; do
		[[ -z ${!name:-} ]] || pass+=("$name=${!name}")
	done
	sudo env "${pass[@]}" "$@"
}

can_be_root() {
	[[ $EUID -eq 0 ]] && return 0
	command -v sudo >/dev/null || return 1
	# Asks for the password once, here, and not in the middle of a step whose output goes to a log.
	if [[ -t 0 && -t 2 ]]; then sudo -v; else sudo -n -v 2>/dev/null || sudo -n true 2>/dev/null; fi
}

# --- what to say -------------------------------------------------------------------------------------------------

if [[ -t 1 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; then
	BOLD=$'\e[1m' RED=$'\e[31m' GREEN=$'\e[32m' YELLOW=$'\e[33m' OFF=$'\e[0m' REDRAW=$'\r\e[K'
else
	BOLD='' RED='' GREEN='' YELLOW='' OFF='' REDRAW=''
fi

note() { printf '%s\n' "$*"; }
warn() { printf '%swarning%s %s\n' "$YELLOW" "$OFF" "$*" >&2; }
die() {
	printf '%serror%s   %s\n' "$RED" "$OFF" "$1" >&2
	shift
	(($# == 0)) || printf '        %s\n' "$@" >&2
	exit 1
}

now_ms() { local t=${EPOCHREALTIME/[.,]/}; echo "${t::-3}"; }
seconds() { printf '%d.%d s' $(($1 / 1000)) $(($1 % 1000 / 100)); }

done_line() { printf '%s%sok%s      %s (%s)\n' "$REDRAW" "$GREEN" "$OFF" "$1" "$(seconds "$2")"; }

# fail_line LABEL LOG REMEDY... says that a step failed, the end of its log, and what to do.
fail_line() {
	local label=$1 log=$2
	shift 2
	printf '%s%sfailed%s  %s\n' "$REDRAW" "$RED" "$OFF" "$label" >&2
	if [[ -s $log ]]; then
		tail -n 20 "$log" | sed 's/^/        | /' >&2
		printf '        all of it: %s\n' "$log" >&2
	fi
	(($# == 0)) || printf '        %s\n' "$@" >&2
}

# step LABEL REMEDY COMMAND... runs a command quietly and prints one line with the time it took.
step() {
	local label=$1 remedy=$2 log begin rc=0
	shift 2
	log=$UP/step.log
	up_dir
	begin=$(now_ms)
	[[ -z $REDRAW ]] || printf '        %s ...' "$label"
	# Not `|| rc=$?`: that would switch `set -e` off in all that the command calls.
	set +e
	(set -e; "$@") >"$log" 2>&1 </dev/null
	rc=$?
	set -e
	if ((rc != 0)); then
		fail_line "$label" "$log" ${remedy:+"$remedy"}
		exit "$rc"
	fi
	done_line "$label" $(($(now_ms) - begin))
}

# --- the record --------------------------------------------------------------------------------------------------

up_dir() {
	[[ -d $UP ]] || as_person mkdir -p "$UP"
	# Made by the person, so that a later `make` without sudo can write them too.
	as_person touch "$UP/made" "$UP/step.log"
}

# made KIND VALUE notes something that `make purge` is to remove. Kinds: package, docker-root, image, data-dir,
# config-dir, key, context.
made() {
	up_dir
	is_made "$1" "$2" || printf '%s %s\n' "$1" "$2" >>"$UP/made"
}
is_made() { [[ -f $UP/made ]] && grep -qxF -- "$1 $2" "$UP/made"; }
list_made() { [[ ! -f $UP/made ]] || sed -n "s/^$1 //p" "$UP/made"; }
forget_made() {
	[[ -f $UP/made ]] || return 0
	local rest
	rest=$(grep -vxF -- "$1 $2" "$UP/made" || true)
	printf '%s' "${rest:+$rest$'\n'}" >"$UP/made"
}

# --- processes ---------------------------------------------------------------------------------------------------

# A pid alone may name another process by now; with its start time it cannot.
started_at() {
	local stat fields
	stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
	# The name, in brackets, may hold spaces; what follows the last bracket does not.
	read -ra fields <<<"${stat##*) }"
	# A zombie has ended; only its parent has not asked yet.
	[[ ${fields[0]} != Z ]] || return 1
	echo "${fields[19]}"
}

# running PIDFILE prints the pid if the process that it names is still the same one.
running() {
	local pid at
	[[ -r $1 ]] || return 1
	read -r pid at <"$1" || return 1
	[[ -n $at && $(started_at "$pid") == "$at" ]] || return 1
	echo "$pid"
}

# background PIDFILE LOG COMMAND... starts a process as root in a session of its own, so that it outlives the
# terminal and `make`, with none of their descriptors.
background() {
	local pidfile=$1 log=$2
	shift 2
	rm -f "$pidfile"
	# shellcheck disable=SC2016 # for the inner shell
	as_root setsid --fork bash -c '
		pidfile=$1 log=$2
		shift 2
		exec </dev/null >>"$log" 2>&1
		for fd in /proc/$$/fd/*; do
			fd=${fd##*/}
			((fd <= 2 || fd == 255)) || eval "exec $fd>&-"
		done
		read -ra fields <<<"$(s=$(cat /proc/$$/stat); echo "${s##*) }")"
		echo "$$ ${fields[19]}" >"$pidfile"
		exec "$@"
	' background "$pidfile" "$log" "$@"
	local i
	for ((i = 0; i < 50; i++)); do
		[[ ! -s $pidfile ]] || return 0
		sleep 0.1
	done
	return 1
}

# signal NAME PID goes through bash's own kill: the program of that name is in a package that minimal systems lack.
# shellcheck disable=SC2016 # for the inner shell
signal() { as_root bash -c 'kill -s "$1" -- "$2"' signal "$1" "$2" 2>/dev/null || true; }

# named NAME: does a process of that name run? Zombies, which a machine without an init may keep, do not count.
named() { grep -qE "^[0-9]+ \($1\) [^ZX] " /proc/[0-9]*/stat 2>/dev/null; }

# end_process PIDFILE SECONDS [group] ends that process (and with `group` all that it started), gently and then not, and
# waits until it is gone.
end_process() {
	local pid i whom
	if ! pid=$(running "$1"); then
		as_root rm -f "$1"
		return 0
	fi
	whom=$pid
	[[ ${3:-} != group ]] || whom=-$pid
	signal TERM "$whom"
	for ((i = 0; i < $2 * 10; i++)); do
		running "$1" >/dev/null || break
		sleep 0.1
	done
	if running "$1" >/dev/null; then
		signal KILL "$whom"
		sleep 0.2
	fi
	as_root rm -f "$1"
}

# --- versions, disk, ports -----------------------------------------------------------------------------------------

# older A B: is version A older than B?
older() { [[ $1 != "$2" && $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

# existing PATH prints the nearest ancestor that exists.
existing() { local p=$1; while [[ ! -e $p ]]; do p=$(dirname "$p"); done; echo "$p"; }

# free_kib PATH prints how much is free where the path is or will be.
free_kib() { df -Pk "$(existing "$1")" 2>/dev/null | awk 'NR == 2 { print $4 }'; }

# listener HOST:PORT prints "PID NAME" of what already listens there ("? another user's process" when it may not be
# seen), or nothing. It reads /proc, since a fresh machine may have neither ss nor lsof.
listener() {
	local host=${1%:*} port=${1##*:} inode='' link pid
	host=${host#[} host=${host%]}
	inode=$(PORT=$(printf '%04X' "$port") HOST=$host awk '
		function reversed(ip,  p) { split(ip, p, "."); return sprintf("%02X%02X%02X%02X", p[4], p[3], p[2], p[1]) }
		BEGIN {
			port = ENVIRON["PORT"]; host = ENVIRON["HOST"]
			if (host == "localhost") host = "127.0.0.1"
			want = host ~ /^[0-9.]+$/ ? reversed(host) : ""
		}
		$4 == "0A" {
			split($2, a, ":")
			if (a[2] != port) next
			# A wildcard, ours or theirs, takes the port on every address.
			if (want == "" || want == "00000000" || a[1] ~ /^0+$/ || a[1] == want) { print $10; exit }
		}' "${BOXED_PROC:-/proc}"/net/tcp "${BOXED_PROC:-/proc}"/net/tcp6 2>/dev/null || true)
	[[ -n $inode ]] || return 0
	if can_be_root; then
		link=$(as_root find /proc/[0-9]*/fd -lname "socket:\[$inode\]" -print -quit 2>/dev/null || true)
	fi
	[[ -n $link ]] || link=$(find /proc/[0-9]*/fd -lname "socket:\[$inode\]" -print -quit 2>/dev/null || true)
	if [[ -z $link ]]; then
		echo "? another user's process"
		return 0
	fi
	pid=${link#/proc/}
	pid=${pid%%/*}
	echo "$pid $(cat "/proc/$pid/comm" 2>/dev/null || echo unknown)"
}

# http_status URL prints the status and then the body. In bash alone: a fresh machine has no curl.
http_get() {
	local rest=${1#http://} hostport path
	hostport=${rest%%/*}
	path=/${rest#*/}
	# shellcheck disable=SC2016 # for the inner shell
	timeout 5 bash -c '
		exec 3<>"/dev/tcp/${1%:*}/${1##*:}" || exit 1
		printf "GET %s HTTP/1.0\r\nHost: %s\r\nConnection: close\r\n\r\n" "$2" "$1" >&3
		read -r _ status _ <&3 || exit 1
		echo "$status"
		while IFS= read -r line <&3; do line=${line%$'"'\r'"'}; [[ -n $line ]] || break; done
		cat <&3
	' http_get "$hostport" "$path" 2>/dev/null
}

# --- Go ------------------------------------------------------------------------------------------------------------

go_wanted() { awk '$1 == "go" { print $2; exit }' "$ROOT/go.mod"; }

# find_go puts a Go that is new enough first on PATH. `sudo` resets PATH, and the usual places are not on root's.
# Sets GO_WHY when it finds none.
find_go() {
	local want have='' dir best=''
	want=$(go_wanted)
	for dir in '' /usr/local/go/bin "$PERSON_HOME/go/bin" "$PERSON_HOME/sdk/go/bin" /usr/lib/go/bin /snap/bin; do
		if [[ -n $dir ]]; then
			# Tests of these scripts see only the Go on their PATH.
			[[ -z ${BOXED_ONLY_PATH:-} && -x $dir/go ]] || continue
			have=$(GOTOOLCHAIN=local "$dir/go" env GOVERSION 2>/dev/null) || continue
		else
			command -v go >/dev/null || continue
			have=$(cd / && GOTOOLCHAIN=local go env GOVERSION 2>/dev/null) || have=go0
		fi
		have=${have#go}
		have=${have%% *}
		[[ -n $best ]] || best=$have
		if ! older "$have" "$want"; then
			[[ -z $dir ]] || PATH=$dir:$PATH
			export PATH
			return 0
		fi
	done
	# Go 1.21 and newer may fetch the toolchain that go.mod asks for, unless told not to.
	if [[ -n $best ]] && ! older "$best" 1.21 && command -v go >/dev/null &&
		have=$(cd "$ROOT" && timeout 300 go env GOVERSION 2>/dev/null) && ! older "${have#go}" "$want"; then
		return 0
	fi
	if [[ -z $best ]]; then
		GO_WHY="Go is missing"
	else
		GO_WHY="Go $best is older than the $want that go.mod asks for"
	fi
	return 1
}

# --- packages ------------------------------------------------------------------------------------------------------

has_package() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q ' installed$'; }

# install_packages NAME... installs what is not there yet and records everything that came with it.
install_packages() {
	local missing=() p before after
	for p in "$@"; do has_package "$p" || missing+=("$p"); done
	((${#missing[@]} > 0)) || return 0
	before=$(mktemp)
	after=$(mktemp)
	dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii //p' | sort >"$before"
	# RUNLEVEL=1 keeps a package's init script from starting its daemon where there is no service manager to own it.
	local env=(DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1)
	[[ -d /run/systemd/system ]] || env+=(RUNLEVEL=1)
	local install=(apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120)
	local rc=0
	as_root apt-get update -q -o DPkg::Lock::Timeout=120 || true
	as_root env "${env[@]}" "${install[@]}" "${missing[@]}" || rc=$?
	dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii //p' | sort >"$after"
	while read -r p; do made package "$p"; done < <(comm -13 "$before" "$after")
	rm -f "$before" "$after"
	return "$rc"
}

# --- the engine ----------------------------------------------------------------------------------------------------

OLDEST_ENGINE=20.10

# probe_engine sets ENGINE to one of
#   serves   it answers and is fit; DOCKER_ROOT is where it keeps images
#   down     it is installed and does not answer
#   absent   there is none
#   unfit    one answers that cannot serve: ENGINE_WHY and ENGINE_FIX say why and what mends it
# and DOCKER_AS_ROOT if it takes root to reach it.
probe_engine() {
	local out socket
	ENGINE='' ENGINE_WHY='' ENGINE_FIX='' DOCKER_ROOT=/var/lib/docker
	DOCKER_AS_ROOT=''
	if [[ $DOCKER_HOST != unix://* ]]; then
		unfit "DOCKER_HOST=$DOCKER_HOST is an engine on another machine; sandboxes need one here" "unset DOCKER_HOST"
		return
	fi
	socket=${DOCKER_HOST#unix://}
	if ! command -v docker >/dev/null; then
		# An engine without its client counts as absent: the package that brings one brings the other.
		ENGINE=absent
		return
	fi
	local format='{{.Server.Version}}|{{.Server.Os}}|{{.Server.Arch}}|{{range .Server.Components}}{{.Name}};{{end}}'
	if ! out=$(timeout 20 docker version --format "$format" 2>&1); then
		case $out in
		*"permission denied"*)
			if can_be_root && out=$(as_root timeout 20 docker version --format "$format" 2>&1); then
				DOCKER_AS_ROOT=yes
			elif [[ $out == *"permission denied"* ]]; then
				unfit "Docker answers, but $PERSON may not use it ($socket: permission denied)" \
					"sudo usermod -aG docker $PERSON, then log in again; or run this as root"
				return
			fi
			;;&
		*"too old"* | *"too new"*)
			unfit "the docker command does not fit its engine: ${out##*: }" "update the docker command or the engine"
			return
			;;
		*"annot connect"* | *"no such file"* | *"connection refused"* | *"failed to connect"*)
			if command -v dockerd >/dev/null || [[ -x /usr/sbin/dockerd ]]; then ENGINE=down; else ENGINE=absent; fi
			return
			;;
		esac
		if [[ -z $DOCKER_AS_ROOT ]]; then
			out=$(tail -n 1 <<<"$out")
			unfit "Docker does not answer: ${out:-nothing within 20 s}" "see that 'docker version' answers, then try again"
			return
		fi
	fi
	local version os arch parts info host_arch
	IFS='|' read -r version os arch parts <<<"$(tail -n 1 <<<"$out")"
	case $(uname -m) in x86_64) host_arch=amd64 ;; aarch64 | arm64) host_arch=arm64 ;; *) host_arch=$(uname -m) ;; esac
	if [[ $os != linux ]]; then
		unfit "this Docker runs $os containers" "switch it to Linux containers, or use an engine on a Linux host"
	elif [[ $parts == *Podman* ]]; then
		unfit "$socket is Podman, not Docker" "stop podman.socket and install Docker's engine, or set DOCKER_HOST to its socket"
	elif older "$version" "$OLDEST_ENGINE"; then
		unfit "Docker $version is older than $OLDEST_ENGINE" "update the Docker engine"
	elif [[ -n $arch && $arch != "$host_arch" ]]; then
		unfit "this Docker runs $arch containers on a $host_arch host" "use an engine of this host"
	elif ! info=$(docker_do info --format '{{.DockerRootDir}}|{{.OperatingSystem}}|{{.SecurityOptions}}' 2>&1); then
		unfit "Docker does not tell about itself: $(tail -n 1 <<<"$info")" "see that 'docker info' answers, then try again"
	elif [[ $info == *rootless* ]]; then
		unfit "this Docker runs rootless: it can give sandboxes no limits and no users of their own" \
			"unset DOCKER_HOST, or set it to the socket of an engine that runs as root"
	elif [[ $info == *"Docker Desktop"* ]]; then
		unfit "Docker Desktop runs its containers in a virtual machine, away from this host's files" \
			"install the Docker engine itself (docker.io or docker-ce)"
	else
		ENGINE=serves
		DOCKER_ROOT=$(tail -n 1 <<<"$info")
		DOCKER_ROOT=${DOCKER_ROOT%%|*}
	fi
}
unfit() { ENGINE=unfit ENGINE_WHY=$1 ENGINE_FIX=$2; }

docker_do() { if [[ -n $DOCKER_AS_ROOT ]]; then as_root docker "$@"; else docker "$@"; fi; }

# --- images --------------------------------------------------------------------------------------------------------

DEFAULT_IMAGE=boxed/default:latest

recipe_of() { docker_do image inspect --format '{{index .Config.Labels "boxed.recipe"}}' "$1" 2>/dev/null || true; }
image_id() { docker_do image inspect --format '{{.Id}}' "$1" 2>/dev/null || true; }

# image_check small|full prints `kept NAME` if it is there and its recipe has not changed, else `stale NAME`.
image_check() {
	if [[ -n $DOCKER_AS_ROOT ]]; then
		as_root "$ROOT/images/build" "$1" --check 2>/dev/null
	else
		"$ROOT/images/build" "$1" --check 2>/dev/null
	fi
}

# own_default: does the default template's image come from a person, not from these scripts? Then it is theirs.
own_default() { [[ -n $(image_id "$DEFAULT_IMAGE") && -z $(recipe_of "$DEFAULT_IMAGE") ]]; }

# remove_containers_of DATA_DIR removes the containers of nodes with that data directory: warm sandboxes that a stopped
# node kept for its next start. Their label (sandbox/docker) ends with the hash of the directory's path.
remove_containers_of() {
	local id instance hash
	hash=$(printf '%s' "$1" | sha256sum | cut -c1-8)
	while read -r id instance; do
		[[ $instance == *."$hash" ]] || continue
		docker_do rm -f "$id" >/dev/null && echo "$id"
	done < <(docker_do ps -a --no-trunc --filter label=sh.boxed.instance --format '{{.ID}} {{.Label "sh.boxed.instance"}}' 2>/dev/null)
}
