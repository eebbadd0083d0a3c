#!/bin/sh
# Makes a Debian root with mmdebstrap: root.img (ext4 without partitions, labelled `debian`) and root.qcow2 with the same
# content, and beside them the kernels and their initrds. debian.rs prepares a directory and runs it there.
#
#   root.sh RELEASE LATER IMAGE_MIB PACKAGE,…
#
# sources/ has APT's sources for RELEASE, and for LATER, a suite whose newer kernel is to stand beside RELEASE's own (`-`
# for none). job.sh and job.service are what the root does if the kernel's command line says so.
set -eu
PATH=$PATH:/usr/sbin:/sbin
release=$1 later=$2 mib=$3 packages=$4

mkdir -p add/etc/systemd/system/multi-user.target.wants add/usr/local/sbin
echo 'LABEL=debian / ext4 errors=remount-ro 0 1' >add/etc/fstab
echo debian >add/etc/hostname
install -m 644 job.service add/etc/systemd/system/exitless-job.service
ln -s ../exitless-job.service add/etc/systemd/system/multi-user.target.wants/
install -m 755 job.sh add/usr/local/sbin/exitless-job

# How this machine reaches its mirror, by a proxy perhaps, holds while the root is made.
apt-config dump --no-empty --format '%f "%v";%n' Acquire::http Acquire::https \
    Acquire::Check-Valid-Until Acquire::Check-Date >acquire.conf
set -- --variant=important --include="$packages" --aptopt="$PWD/acquire.conf" \
    --customize-hook='copy-in add/etc add/usr /'
# Tools that make initrds put no driver of an IOMMU into them, and none of the endpoints has one before it does. Only a kernel
# that is installed from here on has this in its initrd: LATER's, since RELEASE's may have no such module.
# shellcheck disable=SC2016  # for mmdebstrap
set -- "$@" --customize-hook='echo virtio_iommu >>"$1/etc/initramfs-tools/modules"'
if [ "$later" != - ]; then
    set -- "$@" --customize-hook="APT_CONFIG=\"\$MMDEBSTRAP_APT_CONFIG\" apt-get -q -y --no-install-recommends -t $later \
        -o DPkg::Chroot-Directory=\"\$1\" install linux-image-amd64"
fi
# Beside the rest, where there is room; whoever is not root has it made by users of its own, who cannot reach this.
[ "$(id -u)" != 0 ] || export TMPDIR="$PWD"
mmdebstrap "$@" --customize-hook='rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap"' "$release" root.tar sources/*

# Files have their owners when root unpacks them, or somebody who seems to be root.
as_root=
[ "$(id -u)" = 0 ] || as_root=fakeroot
# shellcheck disable=SC2016  # for the shell that is started
$as_root sh -euc '
    mkdir root
    tar -x -f root.tar -C root --xattrs --xattrs-include="*" 2>/dev/null || tar -x -f root.tar -C root
    mke2fs -q -t ext4 -L debian -d root root.img "$0M"
    cp --sparse=always root/boot/vmlinuz-* root/boot/initrd.img-* .
    rm -rf root' "$mib"
qemu-img convert -f raw -O qcow2 root.img root.qcow2
rm -rf root.tar add acquire.conf
