#!/bin/bash
# DPDK's virtio-user, a vhost-user-net client without a guest, on `exitless serve --net tap=` in a network namespace: its
# testpmd answers ARP and pings, of which none may be lost or come back changed.
#
#   dpdk.sh split|split-in-order|packed|packed-in-order
#
# Environment: TESTPMD [dpdk-testpmd], and that of net-common.sh and common.sh.
. "$(dirname "$0")/net-common.sh"

mode=${1:-}
case $mode in
    split) device=mrg_rxbuf=1,in_order=0 ;;
    split-in-order) device=mrg_rxbuf=1,in_order=1 ;;
    packed) device=mrg_rxbuf=1,in_order=0,packed_vq=1 ;;
    packed-in-order) device=mrg_rxbuf=0,in_order=1,packed_vq=1,vectorized=1 ;;
    *) fail "usage: dpdk.sh split|split-in-order|packed|packed-in-order" ;;
esac
testpmd=${TESTPMD:-dpdk-testpmd}
need "$testpmd" "dpdk, dpdk-dev"
[ -x "$EXITLESS" ] || fail "there is no program $EXITLESS (make build)"

make_space 1500 t0
start_net_daemon tap=t0
wait_for_daemon
# Without huge pages; the forwarding thread takes what the daemon leaves.
"$testpmd" --lcores '0,1' --no-pci --no-huge -m 512 --file-prefix="$space" \
    --vdev "net_virtio_user0,path=$scratch/n0.sock,mac=52:54:00:77:00:02,queues=1,$device" \
    -- --burst=32 --nb-cores=1 --txd=256 --rxd=256 --total-num-mbufs=16384 --stats-period=1 --forward-mode=icmpecho --auto-start \
    </dev/null >"$scratch/testpmd.log" 2>&1 &
client=$!
processes+=("$client")

# shellcheck disable=SC2317  # called by name
answers() { in_space ping -q -n -c 1 -W 1 "$guest_ip" >"$scratch/first.log" 2>&1 || is_gone "$client"; }
until_true 30 answers || fail "testpmd does not answer"
! is_gone "$client" || fail "testpmd ended"
ping_guest ping_lost_dpdk
ping_guest ping_lost_dpdk_1472 -s 1472 -M "do"
kill -TERM "$client"
until_true 10 is_gone "$client" || fail "testpmd does not end"
end_daemon
check_net_daemon
pass_net "DPDK's virtio-user, $mode:"
