#!/bin/sh
# Linux's own IOVA allocator and IOMMU page tables in user space, for `make bench-dma` to measure ours beside them:
# drivers/iommu/iova.c, lib/rbtree.c and drivers/iommu/generic_pt (VT-d second stage), unmodified, over the shim in
# bench/dma-linux. Prints the shared object's path, or nothing and why: then the ratios to Linux are void.
#
# The source is Debian's linux-source of the first suite that has one of at least 6.19: the machine's, its backports, then
# the suites that follow on the same mirror. It and what is built of it stay in the cache directory (`exitless-lab lab --help`
# names it, EXITLESS_LAB_DIR chooses it); nothing of it comes into this tree, and nothing is installed.
set -eu
need=6.19
releases="bullseye bookworm trixie forky duke sid"

void() {
    echo "linux-iova.sh: $1: ratios to Linux are void" >&2
    exit 0
}

root=$(cd "$(dirname "$0")/.." && pwd)
shim=$root/bench/dma-linux/shim
dir=${EXITLESS_LAB_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/exitless/lab}/linux-iova
cc=${CC:-cc}
[ "$(uname -m)" = x86_64 ] || void "not an x86-64 machine"
command -v "$cc" >/dev/null || void "no C compiler ($cc)"
mkdir -p "$dir" || void "nothing can be kept in $dir"
dir=$(cd "$dir" && pwd)
apt=$dir/apt
exec 9>"$dir/lock"
flock 9

at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# The machine's APT sources for their release $base, with the suite $1 in its place.
derive() {
    rm -rf "$apt/sources.list.d"
    mkdir -p "$apt/sources.list.d" "$apt/lists/partial" "$apt/archives/partial" "$apt/state"
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -e "$file" ] || continue
        sed -En "s/^(deb[ 	]+(\[[^]]*\][ 	]*)?[^ 	]+)[ 	]+$base([ 	].*)/\1 $1\3/p" "$file"
    done >"$apt/sources.list.d/derived.list"
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] || continue
        awk -v base="$base" -v suite="$1" 'BEGIN { RS = ""; ORS = "\n\n" } !/\nEnabled: *no/ && match($0, /(^|\n)Suites:[^\n]*/) {
            if (index(substr($0, RSTART, RLENGTH) " ", " " base " ")) {
                print substr($0, 1, RSTART - 1) "\nSuites: " suite substr($0, RSTART + RLENGTH)
            }
        }' "$file"
    done | sed '/./,$!d' >"$apt/sources.list.d/derived.sources"
}

# APT with lists, archives and state of its own.
apt() {
    tool=$1
    shift
    LC_ALL=C "$tool" -qq -o Dir::State="$apt/state" -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt" \
        -o Dir::Etc::SourceParts="$apt/sources.list.d" -o Dir::Etc::SourceList=- -o Dir::State::status=/dev/null \
        -o Debug::NoLocking=1 -o APT::Sandbox::User=root -o Acquire::Retries=3 -o Acquire::http::Timeout=30 "$@"
}

# Fetches the files of the first kernel that will do into $dir/source.
fetch() {
    for tool in apt-get apt-cache dpkg-deb xz; do
        command -v $tool >/dev/null || void "no $tool"
    done
    base=
    for name in $releases; do
        if cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
            grep -v '^#' | grep -qw "$name"; then
            base=$name
            break
        fi
    done
    [ -n "$base" ] || void "the machine's APT sources name no Debian release"
    found=
    for name in ${releases#*"${base}"} experimental; do
        later="${later-} $name $name-backports"
    done
    for suite in "$base" "$base-backports" $later; do
        echo "linux-iova.sh: looking in $suite" >&2
        derive "$suite"
        apt apt-get update >&2 || continue
        found=$(apt apt-cache pkgnames linux-source- | grep -E '^linux-source-[0-9]+\.[0-9]+$' | sort -V | tail -n 1)
        [ -z "$found" ] || ! at_least "${found#linux-source-}" "$need" || break
        found=
    done
    [ -n "$found" ] || void "no suite has linux-source of at least $need"
    echo "linux-iova.sh: fetching $found of $suite (once)" >&2
    rm -rf "$dir/source" "$dir/source.new"
    mkdir "$dir/source.new"
    (cd "$apt/archives" && apt apt-get download "$found") >&2 || void "$found cannot be fetched"
    dpkg-deb --fsys-tarfile "$apt/archives/$found"_*.deb | tar -xO "./usr/src/$found.tar.xz" | xz -dc |
        tar -x -C "$dir/source.new" --strip-components=1 --wildcards '*/drivers/iommu/generic_pt' '*/drivers/iommu/iova.c' \
            '*/include/linux/generic_pt' '*/include/linux/iova.h' '*/include/linux/rbtree*.h' '*/lib/rbtree.c' \
            "$found/Makefile" || void "$found cannot be unpacked"
    rm -rf "$apt"
    mv "$dir/source.new" "$dir/source"
}

[ -e "$dir/source/Makefile" ] || fetch
cd "$dir/source"
version=$(awk -F ' *= *' '/^(VERSION|PATCHLEVEL|SUBLEVEL) *=/ { v = v (v == "" ? "" : ".") $2 } END { print v }' Makefile)
built=$dir/linux-iova-$version-$(cat "$shim"/* "$root/scripts/linux-iova.sh" | cksum | cut -d ' ' -f 1).so
if [ ! -e "$built" ]; then
    # Every header that these files name and that is not among them is the shim, but for two that the C library names too.
    rm -rf stubs
    grep -rhoE '#include <[^>]+>' drivers lib include "$shim/abi.c" | sed 's/#include <\(.*\)>/\1/' | sort -u | while read -r header; do
        case $header in linux/errno.h | linux/limits.h) continue ;; linux/* | asm/*) ;; *) continue ;; esac
        [ -e "include/$header" ] && continue
        mkdir -p "stubs/$(dirname "$header")"
        echo '#include <shim.h>' >"stubs/$header"
    done
    echo '#include <shim.h>' >drivers/iommu/iommu-pages.h
    "$cc" -std=gnu11 -O2 -g -fPIC -shared -Wl,-Bsymbolic -fno-semantic-interposition -fno-strict-aliasing -w \
        $(grep -q '(\*map_range)' include/linux/generic_pt/iommu.h && echo -DHAS_MAP_RANGE) -DLINUX_VERSION="\"$version\"" -include "$shim/shim.h" -I "$shim" -I include -I stubs -o "$built.new" \
        drivers/iommu/iova.c lib/rbtree.c drivers/iommu/generic_pt/fmt/iommu_vtdss.c "$shim/abi.c" >&2 ||
        void "Linux $version cannot be built"
    mv "$built.new" "$built"
fi
echo "$built"
