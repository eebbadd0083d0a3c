#!/bin/sh
# Makes a Debian 12 machine ready to build: a C linker, gcc-12, xz, and a Rust of at least 1.88; `setup.sh fuzz`: also a C++
# compiler, for libFuzzer. `setup.sh clients`: only the programs that tests/clients runs, as far as that is possible
# (tests that need them are skipped without). `setup.sh debian`: what the lab makes its Debian root with.
# Installs only what is missing; says what it does; asks sudo only when it must. Everything the lab
# needs (QEMU, a guest kernel, busybox) is fetched later by `exitless-lab lab` itself, without installing it.
set -eu

need_rust=1.88

have() { command -v "$1" >/dev/null 2>&1; }

# True when version $1 is at least version $2.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

rust_ok() {
    have cargo && have rustc || return 1
    at_least "$(rustc --version | awk '{ split($2, v, "-"); print v[1] }')" "$need_rust"
}

as_root=
[ "$(id -u)" = 0 ] || as_root=sudo

install() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# Installs the packages in $missing, or says which they are.
install_missing() {
    [ -z "$as_root" ] || have sudo || {
        echo "setup: these Debian packages are missing and installing them needs root:$missing" >&2
        exit 1
    }
    echo "setup: installing$missing"
    # shellcheck disable=SC2086  # a list of words on purpose
    install $missing
}

if [ "${1-}" = clients ]; then
    PATH=$PATH:/usr/sbin:/sbin
    missing=
    have qemu-img || missing="$missing qemu-utils"
    have qemu-storage-daemon || missing="$missing qemu-system-common"
    have qemu-system-x86_64 || missing="$missing qemu-system-x86"
    have linux.uml || missing="$missing user-mode-linux"
    # Network devices: a namespace with TAP interfaces, pings, streams. (DPDK's virtio-user, packages dpdk and dpdk-dev, is
    # not installed for its test.)
    have ip || missing="$missing iproute2"
    have ping || missing="$missing iputils-ping"
    have iperf3 || missing="$missing iperf3"
    have syslinux || missing="$missing syslinux"
    have mformat || missing="$missing mtools"
    # File systems that disks are tried on, where the kernel knows them.
    have mkfs.ext4 || missing="$missing e2fsprogs"
    have mkfs.xfs || missing="$missing xfsprogs"
    have mkfs.btrfs || missing="$missing btrfs-progs"
    have mkfs.vfat || missing="$missing dosfstools"
    [ -n "$missing" ] || exit 0
    echo "setup: installing$missing"
    # shellcheck disable=SC2086  # a list of words on purpose
    { have apt-get && { [ -z "$as_root" ] || have sudo; } && install $missing; } ||
        echo "setup: cannot install$missing: tests that need them are skipped" >&2
    exit 0
fi

if [ "${1-}" = debian ]; then
    PATH=$PATH:/usr/sbin:/sbin
    missing=
    have mmdebstrap || missing="$missing mmdebstrap"
    have fakeroot || missing="$missing fakeroot"
    have mke2fs || missing="$missing e2fsprogs"
    have qemu-img || missing="$missing qemu-utils"
    # Whoever is not root makes the root as a range of users of its own.
    [ "$(id -u)" = 0 ] || have newuidmap || missing="$missing uidmap"
    [ -z "$missing" ] || install_missing
    exit 0
fi

missing=
have cc || missing="$missing gcc libc6-dev"
# A kernel module for the lab's guest: the compiler of Debian 12's kernels, and what their objtool links to.
have gcc-12 || missing="$missing gcc-12"
[ -e /usr/lib/x86_64-linux-gnu/libelf.so.1 ] || missing="$missing libelf1"
have xz || missing="$missing xz-utils"
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
# libc.a: the guest's test program is linked statically, so that it runs in an image with nothing else.
[ -e /usr/lib/x86_64-linux-gnu/libc.a ] || missing="$missing libc6-dev"
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"
[ "${1-}" != fuzz ] || have "${CXX:-c++}" || missing="$missing g++"
if ! rust_ok; then
    missing="$missing rustc-web cargo-web rustfmt-web rust-web-clippy"
    # The ordinary Debian packages hold the same paths and conflict with the -web ones.
    remove=$(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' rustc cargo rustfmt rust-clippy \
        2>/dev/null | awk '$1 == "ii" { printf " %s-", $2 }')
    missing="$missing$remove"
fi
[ -n "$missing" ] || exit 0
install_missing
hash -r
rust_ok || {
    echo "setup: still no Rust >= $need_rust on PATH; found: $(rustc --version 2>&1 || true)" >&2
    exit 1
}
