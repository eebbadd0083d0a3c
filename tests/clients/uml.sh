#!/bin/bash
# User-mode Linux, a vhost-user client without any virtual machine monitor: verified reads, writes, flushes,
# discards and write-zeroes; what the guest read last is what the image holds.
#
#   uml.sh raw|qcow2
#
# Traps: it never acknowledges the feature that brings SET_VRING_ENABLE; its console must be a pipe; its tracing
# processes outlive it and hold that pipe, so nothing may wait for the pipe's end, and the rest is killed by the
# process group that it was started in.
# Environment: SECONDS_IO [3], UML [linux.uml], and that of common.sh.
. "$(dirname "$0")/common.sh"

format=${1:-}
case $format in
    raw | qcow2) ;;
    *) fail "usage: uml.sh raw|qcow2" ;;
esac
uml=${UML:-linux.uml}
need "$uml" user-mode-linux
need qemu-img qemu-utils
need_guest
[ -f "$GUEST_DIR/uml.img" ] || skip "there are no modules in /usr/lib/uml/modules (Debian: user-mode-linux)"

image=$scratch/disk.$format
qemu-img create -q -f "$format" "$image" 32M
start_daemon "$image" "$format" 1
wait_for_daemon

# shellcheck disable=SC2016  # the guest's variables
script='workload mixed /dev/vda --seconds '${SECONDS_IO:-3}' --trim || exit 1
echo sha=$(sha256sum </dev/vda)'
id=xl$$
mkfifo "$scratch/pipe"
cat <"$scratch/pipe" >"$scratch/console.log" &
processes+=($!)
setsid "$uml" "umid=$id" "uml_dir=$scratch/uml" mem=128M "initrd=$GUEST_DIR/uml.img" root=/dev/ram0 \
    "virtio_uml.device=$scratch/b.sock:2" con=null con0=null,fd:1 panic=-1 "$(run_option "$script")" \
    </dev/null >"$scratch/pipe" 2>&1 &
guest=$!
processes+=("-$guest")

# shellcheck disable=SC2317  # called by name
is_done() { grep -qs 'exitless-guest: status=\|Kernel panic' "$scratch/console.log" || is_gone "$guest"; }
until_true 60 is_done || fail "the guest hangs"
# It powers off by itself; what is left of it does not matter.
until_true 10 is_gone "$guest" || fail "the guest does not power off"
kill -KILL -- "-$guest" 2>/dev/null || true

# Before any of its programs has run: it saves a processor's registers in room of a fixed size, and Linux refuses to load them
# from less than this processor has (`xstateregs_set`).
if grep -qs 'ptrace set fp regs failed, errno = 14' "$scratch/console.log"; then
    end_daemon
    skip "user-mode Linux has too little room for the registers of this processor (as those with AMX)"
fi
check_console "$scratch/console.log"
end_daemon
[ "$format" = raw ] || qemu-img check -q "$image" >"$scratch/check.log" 2>&1 || fail "qemu-img check"
[ "$(console_value "$scratch/console.log" sha)" = "$(content_sum "$image" "$format")" ] ||
    fail "the image does not hold what the guest read"
pass "${mixed#mixed ok }"
