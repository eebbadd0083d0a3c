#!/bin/bash
# VLANs through `exitless serve --net tap=`: a QEMU guest (TCG, stock Debian kernel) with two network cards, on two TAP
# interfaces that a bridge connects. The second card is in a namespace of the guest's, with an interface of VLAN 5 as the first
# has one; pings go from one to the other, twice through the daemon each. Between two VLANs nothing gets through.
#
#   net-vlan.sh split|packed
#
# The bridge knows nothing of VLANs, so the kernel here need not either.
# Environment: that of net-common.sh and common.sh.
. "$(dirname "$0")/net-common.sh"

mode=${1:-}
case $mode in
    split) packed=off ;;
    packed) packed=on ;;
    *) fail "usage: net-vlan.sh split|packed" ;;
esac
need_guest
make_space 1500 t0 t1
start_net_daemon tap=t0 tap=t1
wait_for_daemon

# shellcheck disable=SC2016  # the guest's variables
script='lab-load vlan || exit 1
ip link set lo up
unshare -n sh -c "echo \$\$ >/tmp/other; exec sleep 1000" &
until [ -s /tmp/other ] && [ "$(readlink /proc/$(cat /tmp/other)/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link set eth1 netns $(cat /tmp/other)
there() { nsenter -t $(cat /tmp/other) -n "$@"; }
card() { # NAMESPACE-COMMAND INTERFACE LAST-DIGIT VLAN
    $1 ip link set $2 up
    $1 ip link add link $2 name v$4 type vlan id $4
    $1 ip addr add 10.77.$4.$3/24 dev v$4
    $1 ip link set v$4 up
}
card "" eth0 1 5 && card there eth1 2 5 && card "" eth0 1 6 && card there eth1 2 7 || exit 1
there ip addr add 10.77.6.2/24 dev v7
until ping -q -c 1 -W 1 10.77.5.2 >/dev/null; do sleep 0.1; done
ping -q -c '$pings' -i 0.005 -W 10 10.77.5.2 | grep transmitted
ping -q -c 50 -i 0.005 -W 10 -s 1468 10.77.5.2 | grep transmitted
echo wrong VLAN: $(ping -q -c 20 -i 0.005 -W 1 10.77.6.2 | grep transmitted)
kill $(cat /tmp/other)'
cp "$GUEST_DIR/guest.img" "$scratch/net.img"
truncate -s "%512" "$scratch/net.img"
printf '%s\n' "$script" >"$scratch/net.sh"
add_file "$scratch/net.img" net.sh 0100755 "$scratch/net.sh"
add_file "$scratch/net.img" 'TRAILER!!!' 0

# shellcheck disable=SC2054  # the commas are QEMU's
qemu_args=(-machine q35 -accel tcg,thread=multi -cpu max -smp 2,maxcpus=3 -m 256
    -object memory-backend-memfd,id=mem,size=256M,share=on -numa node,memdev=mem
    -nodefaults -no-user-config -display none -no-reboot)
for nth in 0 1; do
    # shellcheck disable=SC2054  # likewise
    qemu_args+=(-chardev "socket,id=net$nth,path=$scratch/n$nth.sock,reconnect=1" -netdev "vhost-user,id=n$nth,chardev=net$nth"
        -device "virtio-net-pci,netdev=n$nth,mac=52:54:00:77:00:1$nth,romfile=,packed=$packed,disable-legacy=on")
done
console=$scratch/console.log status=0
timeout -k 1 240 "$GUEST_DIR/qemu" "${qemu_args[@]}" -serial "file:$console" -kernel "$GUEST_DIR/vmlinuz" -initrd "$scratch/net.img" \
    -append "console=ttyS0 quiet panic=-1 $late_cpus $(run_option 'exec sh /net.sh')" >"$scratch/qemu.log" 2>&1 || status=$?
[ "$status" -eq 0 ] || fail "QEMU ended with status $status"
[ "$(console_value "$console" exitless-guest:\ status)" = 0 ] || fail "the guest's script failed"
end_daemon
check_net_daemon

tr -d '\r' <"$console" | grep 'transmitted' >"$scratch/pings.txt"
grep -q "^$pings packets transmitted, $pings packets received, 0% packet loss" "$scratch/pings.txt" ||
    fail "pings in a VLAN: $(head -n 1 "$scratch/pings.txt")"
grep -q '^50 packets transmitted, 50 packets received' "$scratch/pings.txt" || fail "full frames in a VLAN: $(sed -n 2p "$scratch/pings.txt")"
grep -q '^wrong VLAN: 20 packets transmitted, 0 packets received' "$scratch/pings.txt" || fail "a frame changed its VLAN: $(tail -n 1 "$scratch/pings.txt")"
figures+=(ping_lost_vlan=0)
pass_net "VLANs, $mode rings:"
