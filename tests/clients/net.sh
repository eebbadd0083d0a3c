#!/bin/bash
# A QEMU guest (TCG, stock Debian kernel) with virtio-net over vhost-user, on `exitless serve --net tap=` in a network namespace:
# pings, of which none may be lost, transfers in both directions whose sums are compared, iperf3; also behind QEMU's
# intel-iommu, where the daemon asks for each translation.
#
#   net.sh (plain|strict|lazy)[-7.2][-ats][-packed][-storm][-jumbo]
#
#   strict: the guest invalidates at each unmap; lazy: now and then, everything. ats: by messages to the device's own IOTLB
#   (device-iotlb=on, ats=on), else by those to the unit. 7.2: Debian's QEMU, of which lazy is no mode, and which ends with a segmentation fault
#   where a network device has MSI-X under TCG: its device has none. Otherwise the lab's.
#   storm: while pings go, a stream in each direction and verified I/O of a disk behind the same unit make the guest unmap at
#   full speed. jumbo: an MTU of 9,000 bytes, and pings that fill it.
#
# Environment: KILLS   of the daemon during another transfer, which is whole all the same [0]
#              IPERF   MiB of iperf3 in each direction [16]; 0: none
#              FRAMES_PER_MIB  of the interface for a MiB of TCP, at most, where the guest is not behind an IOMMU [40]
# and that of net-common.sh and common.sh.
. "$(dirname "$0")/net-common.sh"

mode=${1:-} kills=${KILLS:-0} streams=${IPERF:-16} frames_per_mib=${FRAMES_PER_MIB:-40}
kernel=
case $mode in
    plain*) caching= ;;
    strict*) caching=on kernel='intel_iommu=on iommu.strict=1' ;;
    lazy-7.2*) fail "QEMU 7.2 sends back ends no invalidation of a lazy guest" ;;
    lazy*) caching=off kernel='intel_iommu=on iommu.strict=0' ;;
    *) fail "usage: net.sh (plain|strict|lazy)[-7.2][-ats][-packed][-storm][-jumbo]" ;;
esac
case $mode in *-ats*) ats=on ;; *) ats=off ;; esac
case $mode in *-packed*) packed=on ;; *) packed=off ;; esac
case $mode in *-storm*) storm=on ;; *) storm= ;; esac
case $mode in *-jumbo*) mtu=9000 ;; *) mtu=1500 ;; esac
need_guest
qemu=$GUEST_DIR/qemu vectors=
case $mode in
    *-7.2*)
        need qemu-system-x86_64 qemu-system-x86
        qemu=qemu-system-x86_64 vectors=,vectors=0
        ;;
esac

make_space "$mtu" t0
if [ -n "$storm" ]; then
    disk_image=$scratch/disk.raw
    truncate -s 32M "$disk_image"
fi
start_net_daemon tap=t0
wait_for_daemon

# A feature's bit is a character of the file.
# shellcheck disable=SC2016  # the guest's variables
script='for group in /sys/kernel/iommu_groups/*; do
    for device in "$group"/devices/*; do
        case $(cat "$device/class" 2>/dev/null) in 0x020000) echo domain=$(cat "$group/type") ;; esac
    done
done
features=/sys/class/net/eth0/device/features
echo platform=$(cut -c34 $features) packed=$(cut -c35 $features)
echo 12 >/proc/sys/net/ipv4/tcp_tso_rtt_log
ip link set lo up
ip addr add '$guest_ip'/24 dev eth0
ip link set eth0 mtu '$mtu' up
[ ! -b /dev/vda ] || while [ ! -e /tmp/quiet ]; do
    workload mixed /dev/vda --seconds 2 --trim || exit 1
done &
disk=$!
'"$guest_serves"'
touch /tmp/quiet
wait $disk'
make_initrd "$GUEST_DIR/guest.img" "$script"

behind=
# shellcheck disable=SC2054  # the commas are QEMU's
qemu_args=(-machine q35,kernel-irqchip=split -accel tcg,thread=multi -cpu max -smp 2,maxcpus=3 -m 256
    -object memory-backend-memfd,id=mem,size=256M,share=on -numa node,memdev=mem
    -nodefaults -no-user-config -display none -no-reboot)
if [ -n "$caching" ]; then
    behind=,iommu_platform=on,ats=$ats
    qemu_args+=(-device "intel-iommu,intremap=on,caching-mode=$caching,device-iotlb=$ats")
fi
# shellcheck disable=SC2054  # likewise
qemu_args+=(-chardev "socket,id=net,path=$scratch/n0.sock,reconnect=1" -netdev vhost-user,id=n0,chardev=net
    -device "virtio-net-pci,netdev=n0,mac=52:54:00:77:00:02,romfile=,packed=$packed,disable-legacy=on$vectors$behind")
if [ -n "$storm" ]; then
    # shellcheck disable=SC2054  # likewise
    qemu_args+=(-chardev "socket,id=disk,path=$scratch/b.sock,reconnect=1"
        -device "vhost-user-blk-pci,chardev=disk,num-queues=2,disable-legacy=on$behind")
fi
console=$scratch/console.log
: >"$console"
"$qemu" "${qemu_args[@]}" -serial "file:$console" -kernel "$GUEST_DIR/vmlinuz" -initrd "$scratch/net.img" \
    -append "console=ttyS0 quiet panic=-1 $late_cpus $kernel $(run_option 'exec sh /net.sh')" >"$scratch/qemu.log" 2>&1 &
guest=$!
processes+=("$guest")
wait_for_guest
until_true 10 guest_listens 7001 || fail "the guest does not answer"

key=${mode%%-*}
if [ -n "$storm" ]; then
    key=storm
    before=$(counter net0 iotlb_invalidations)
    disk_before=$(counter disk0 iotlb_invalidations)
    # Longer than the pings; a window that the interface's queue has room for.
    seconds=$((pings * ping_ms / 1000 + 60))
    ip netns exec "$space" iperf3 -c $guest_ip -p 7003 -t $seconds --bidir -w 64K >"$scratch/iperf-storm.log" 2>&1 &
    stream=$!
    processes+=("$stream")
    begin=$(now_ms)
fi
size=56
[ "$mtu" = 1500 ] || size=$((mtu - 28))
ping_guest "ping_lost_$key" -M "do" -s $size
if [ -n "$storm" ]; then
    ! is_gone "$stream" || fail "the stream ended before the pings: $(tail -n 1 "$scratch/iperf-storm.log")"
    took=$(($(now_ms) - begin))
    kill "$stream" 2>/dev/null || true
    { wait "$stream" || true; } 2>/dev/null
    invalidations=$(($(counter net0 iotlb_invalidations) - before))
    disk_invalidations=$(($(counter disk0 iotlb_invalidations) - disk_before))
    figures+=("invalidations_per_s=$(((invalidations + disk_invalidations) * 1000 / took))")
    [ -z "$caching" ] || [ "$invalidations" -gt 0 ] || fail "nothing was unmapped"
fi
fetch
push
if [ -z "$storm" ] && [ "$streams" -gt 0 ]; then
    per_mib t0 tx_packets iperf iperf_h2g_mbit -n "${streams}M"
    figures+=("h2g_frames_per_mib=$frames")
    most=$frames
    per_mib t0 rx_packets iperf iperf_g2h_mbit -n "${streams}M" -R
    figures+=("g2h_frames_per_mib=$frames")
    [ "$most" -gt "$frames" ] || most=$frames
    case $mode in
        plain*)
            # Segments of up to 64 KiB, both ways.
            [ "$most" -le "$frames_per_mib" ] || fail "TCP took $most frames of the interface for a MiB, more than $frames_per_mib: ${figures[*]}"
            [ "$mtu" != 1500 ] || figures+=("tap_frames_per_mib=$most")
            ;;
    esac
fi
if [ -n "$caching" ]; then
    figures+=("misses=$(counter net0 misses)" "invalidations=$(counter net0 iotlb_invalidations)")
fi
for ((kill = 1; kill <= kills; kill++)); do
    fetch &
    moving=$!
    sleep "0.$((kill % 5 + 1))"
    kill_daemon
    start_net_daemon tap=t0
    wait_for_daemon
    wait "$moving" || fail "a transfer is not whole after kill $kill"
    push
done
end_guest
end_daemon

platform=0
if [ -n "$caching" ]; then
    platform=1 want=DMA
    [ "$caching" = on ] || want=DMA-FQ
    [ "$(console_value "$console" domain)" = "$want" ] ||
        fail "the guest's domain is '$(console_value "$console" domain)' where $want is meant"
fi
[ "$(console_value "$console" platform)" = $platform ] || fail "iommu_platform is not $platform"
[ "$(console_value "$console" packed)" = "$([ "$packed" = on ] && echo 1 || echo 0)" ] || fail "the ring layout is not packed=$packed"
if [ -n "$storm" ]; then
    check_console "$console"
fi
check_net_daemon
[ "$kills" = 0 ] || figures+=("kills=$kills")
pass_net "$mode:"
