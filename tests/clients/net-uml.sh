#!/bin/bash
# User-mode Linux, a vhost-user-net client without any virtual machine monitor, on `exitless serve --net tap=` in a network
# namespace: pings, of which none may be lost, and transfers in both directions whose sums are compared.
#
# Its traps are those of uml.sh; and were the control queue offered and not served, its driver would spin for ever.
# Environment: UML [linux.uml], and that of net-common.sh and common.sh.
. "$(dirname "$0")/net-common.sh"

uml=${UML:-linux.uml}
need "$uml" user-mode-linux
need_guest
[ -f "$GUEST_DIR/uml.img" ] || skip "there are no modules in /usr/lib/uml/modules (Debian: user-mode-linux)"

make_space 1500 t0
start_net_daemon tap=t0
wait_for_daemon

make_initrd "$GUEST_DIR/uml.img" '
ip link set lo up
ip addr add '$guest_ip'/24 dev eth0
ip link set eth0 up || exit 1
'"$guest_serves"
console=$scratch/console.log
mkfifo "$scratch/pipe"
cat <"$scratch/pipe" >"$console" &
processes+=($!)
setsid "$uml" "umid=xn$$" "uml_dir=$scratch/uml" mem=256M "initrd=$scratch/net.img" root=/dev/ram0 \
    "virtio_uml.device=$scratch/n0.sock:1" con=null con0=null,fd:1 panic=-1 "$(run_option 'exec sh /net.sh')" \
    </dev/null >"$scratch/pipe" 2>&1 &
guest=$!
processes+=("-$guest")
# shellcheck disable=SC2317  # called by name
guest_is_ready() { grep -aqs '^net ready\|exitless-guest: status=\|Kernel panic\|ptrace set fp regs failed' "$console" || is_gone "$guest"; }
until_true 60 guest_is_ready || fail "the guest is not ready"
# As in uml.sh.
if grep -qs 'ptrace set fp regs failed, errno = 14' "$console"; then
    kill -KILL -- "-$guest" 2>/dev/null || true
    end_daemon
    skip "user-mode Linux has too little room for the registers of this processor (as those with AMX)"
fi
wait_for_guest 1
until_true 10 guest_listens 7001 || fail "the guest does not answer"

ping_guest ping_lost_uml
fetch
push
iperf iperf_g2h_mbit 1 -R
end_guest
end_daemon
check_net_daemon
pass_net "user-mode Linux:"
