# What smoke.py checks, as far as a POSIX shell can: for images without python3. Lines are of the same form.
tab=$(printf '\t')
report() { printf '%s\t%s\t%s\n' "$1" "$2" "$3"; }
verdict() { if [ -n "$2" ]; then report "$1" failed "$2"; else report "$1" ok "$3"; fi; }
field() { while IFS=":$tab " read -r key value rest; do [ "$key" = "$1" ] && { echo "$value"; return; }; done </proc/self/status; }
gvisor=
case ${SMOKE_RUNTIME:-} in *runsc* | *gvisor*) gvisor=yes ;; esac

uid=$(field Uid) gid=$(field Gid) bad=
[ "$uid" = 0 ] && bad="the uid is 0"
[ "$gid" = 0 ] && bad="$bad the gid is 0"
verdict uid "$bad" "uid $uid, gid $gid"

bad=
for set in CapInh CapPrm CapEff CapAmb; do
	value=$(field $set)
	case $value in *[!0]*) bad="$bad $set is $value" ;; esac
done
value=$(field CapBnd)
case $value in *[!0]??) [ -z "$gvisor" ] && bad="$bad the bounding set is $value" ;; esac
verdict capabilities "$bad" none

value=$(field NoNewPrivs)
if [ "$value" = 1 ]; then report no_new_privs ok on; else report no_new_privs failed "NoNewPrivs is ${value:-unknown}"; fi

value=$(field Seccomp)
if [ -n "$gvisor" ]; then
	report seccomp skipped "gVisor answers system calls itself"
elif [ "$value" = 2 ]; then
	report seccomp ok "a filter is on"
else
	report seccomp failed "Seccomp is ${value:-unknown}"
fi

bad=
for dir in / /etc /usr /usr/bin /var /root /opt /bin /lib /run /srv /mnt; do
	[ -d $dir ] || continue
	if (: >"$dir/.boxed-smoke") 2>/dev/null; then
		rm -f "$dir/.boxed-smoke"
		bad="$bad $dir can be written to"
	fi
done
verdict read_only_root "$bad" "nothing outside the writable places can be changed"

bad=
while read -r _ _ _ _ point options rest; do
	kind=" $rest"
	kind=${kind#* - }
	kind=${kind%% *}
	case $kind in proc | sysfs | tmpfs | devtmpfs | devpts | mqueue | cgroup | cgroup2 | none) continue ;; esac
	case $point in
	/ | /run/boxed | /.boxed-agent | /etc/passwd | /etc/group | /etc/hosts | /etc/resolv.conf | /etc/hostname)
		case ",$options," in *,ro,*) ;; *) [ -z "$gvisor" ] && bad="$bad $point is mounted read-write" ;; esac ;;
	*) bad="$bad $point is a mount of $kind" ;;
	esac
done </proc/self/mountinfo
verdict host_paths "$bad" "no directory of the host is mounted"

bad=
for path in /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock /run/podman/podman.sock /run/crio/crio.sock /run/systemd/private /run/dbus/system_bus_socket; do
	[ -e $path ] && bad="$bad $path is there"
done
verdict engine_socket "$bad" "no socket of the host's services is there"

bad='' number=0
while IFS=": " read -r name rest; do
	number=$((number + 1))
	[ $number -le 2 ] && continue
	case $name in lo | tunl0 | sit0 | ip6tnl0 | gre0 | gretap0 | erspan0 | ip_vti0 | ip6_vti0 | ip6gre0) ;; *) bad="$bad $name" ;; esac
done </proc/net/dev
verdict interfaces "${bad:+there is$bad}" "only loopback"

bad=
for name in environ maps auxv; do
	if value=$(head -c 1 /proc/1/$name 2>/dev/null | tr '\0' x) && [ -n "$value" ]; then bad="$bad /proc/1/$name can be read"; fi
done
for name in fd root/etc cwd; do
	if ls /proc/1/$name/ >/dev/null 2>&1; then bad="$bad /proc/1/$name can be listed"; fi
done
verdict processes "$bad" "the first process shows nothing of itself"

if kill -0 1 2>/dev/null; then
	report signals failed "the first process can be signalled"
else
	report signals ok "the first process cannot be signalled"
fi

if ! command -v mount >/dev/null; then
	report mount skipped "the image has no mount"
elif mount -t tmpfs none /tmp 2>/dev/null; then
	report mount failed "mount worked"
else
	report mount ok refused
fi

if ! command -v unshare >/dev/null; then
	report unshare skipped "the image has no unshare"
else
	bad=
	for kind in user mount net pid uts ipc; do
		unshare --$kind true 2>/dev/null && bad="$bad a $kind namespace can be made"
	done
	verdict unshare "$bad" "no namespace can be made"
fi

bad=
for path in /dev/*; do
	case ${path#/dev/} in null | zero | full | random | urandom | tty | console | ptmx | pts | shm | mqueue | fd | stdin | stdout | stderr | core | net) ;; *) bad="$bad $path is there" ;; esac
	[ -b "$path" ] && bad="$bad $path is a block device"
done
verdict devices "$bad" "only the usual ones"

bad=
for path in /proc/kcore /proc/sysrq-trigger /proc/sys/kernel/core_pattern /proc/sys/vm/drop_caches /dev/mem /dev/kmsg; do
	if [ -e $path ] && (: >>$path) 2>/dev/null; then bad="$bad $path can be opened for writing"; fi
done
verdict kernel_files "$bad" "masked or read-only"

if command -v getent >/dev/null; then
	value=$(getent hosts example.com)
	case $value in '' | 127.* | ::1*) report names ok "names do not resolve to addresses outside" ;; *) report names failed "example.com is $value" ;; esac
fi

files=unlimited bad=''
while read -r first second third _ hard _; do
	[ "$first $second $third" = "Max open files" ] && files=$hard
done </proc/self/limits
[ "$files" = unlimited ] && bad="the number of open files has no limit"
[ "$files" != unlimited ] && [ "${SMOKE_FILES:-0}" -gt 0 ] && [ "$files" -gt "${SMOKE_FILES:-0}" ] && bad="open files are limited to $files, not $SMOKE_FILES"
verdict limits "$bad" "$files open files"
exit 0
