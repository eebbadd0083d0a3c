#!/bin/sh
# lab-bind: waits until what stands behind a virtio-iommu (0x0017) that has a driver by now is bound,
# half a minute at most: virtio functions (vendor 0x1af4) until they have their device, disks (0x0002)
# until they have their block device. The kernel binds them in threads of its own; scripts expect
# their disk.
looks=0
# until_there PATH…: until one of these is there.
until_there() {
    while [ ! -e "$1" ] && [ $looks -lt 300 ]; do
        looks=$((looks + 1))
        usleep 100000
        # The pattern, looked at again.
        set -- $pattern
    done
}
has_iommu=
for device in /sys/bus/virtio/devices/*; do
    [ -e "$device/driver" ] || continue
    read -r kind < "$device/device"
    [ "$kind" != 0x0017 ] || has_iommu=yes
done
[ -n "$has_iommu" ] || exit 0
for function in /sys/bus/pci/devices/*; do
    echo "${function##*/}" > /sys/bus/pci/drivers_probe 2>/dev/null
    read -r vendor < "$function/vendor"
    [ "$vendor" = 0x1af4 ] || continue
    pattern="$function/virtio*"
    until_there $pattern
    for device in $pattern; do
        read -r kind < "$device/device"
        [ "$kind" = 0x0002 ] && [ -d /sys/bus/virtio/drivers/virtio_blk ] || continue
        pattern="$device/block"
        until_there "$pattern"
    done
done
exit 0
