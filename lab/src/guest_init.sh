#!/bin/busybox sh
# PID 1 of the test guest; its options are described in guest_image.rs.
export PATH=/bin:/sbin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
option() { sed -n "s/^\(.* \)\?exitless\.$1=\([^ ]*\).*/\2/p" /proc/cmdline; }

# Processors that the kernel was told to leave (maxcpus=1): the buses are scanned now.
if [ "$(option cpus)" = late ]; then
    for online in /sys/devices/system/cpu/cpu*/online; do
        [ "$(cat "$online")" = 1 ] || echo 1 >"$online"
    done
fi

# The IOMMU's driver comes before those of its endpoints.
iommu=$(option iommu)
if [ -z "$iommu" ]; then
    iommu=stock
    [ ! -f /modules/iommu-module ] || iommu=module
fi
[ "$iommu" = none ] || lab-load "iommu-$iommu" || echo "exitless-guest: no IOMMU driver: exitless.iommu=$iommu failed"
lab-load order || echo "exitless-guest: not all modules are loaded"
lab-bind

script=$(sed -n 's/^\(.* \)\?exitless\.run="\([^"]*\)".*/\2/p' /proc/cmdline)
# The kernel prints `"exitless.run=…"` for an option quoted as a whole.
[ -n "$script" ] || script=$(sed -n 's/^\(.* \)\?"exitless\.run=\([^"]*\)".*/\2/p' /proc/cmdline)
[ -n "$script" ] || script=$(option run64 | base64 -d)
[ -n "$script" ] || script=$(option run)

cd /root
if [ -n "$script" ]; then
    sh -c "$script"
    echo "exitless-guest: status=$?"
else
    echo "exitless-guest: $(uname -r), $(nproc) CPU; 'exit' or 'poweroff -f' ends the machine"
    setsid cttyhack sh
fi
sync
case $(option end) in
    reboot) reboot -f ;;
    halt) halt -f ;;
    *) poweroff -f ;;
esac
