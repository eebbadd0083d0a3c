#!/bin/sh
# lab-load LIST [PARAMETER=VALUE...]: loads the modules that /modules/LIST names, in its order,
# except those that are loaded already. Arguments are parameters of the last module. Each module
# also takes those words of the kernel's command line that begin with its name and a dot. A module
# that fails does not keep the others from being loaded.
list=/modules/$1
[ -f "$list" ] || { echo "lab-load: no list $1" >&2; exit 2; }
shift
last=
[ $# = 0 ] || last=$(tail -n 1 "$list")
read -r line < /proc/cmdline
set -f
status=0
while read -r module; do
    [ ! -e "/sys/module/$module/initstate" ] || continue
    parameters=
    for word in $line; do
        case $word in "$module".?*) parameters="$parameters ${word#*.}" ;; esac
    done
    [ "$module" != "$last" ] || parameters="$parameters $*"
    # shellcheck disable=SC2086  # a list of words on purpose
    insmod "/modules/$module.ko" $parameters || status=1
done < "$list"
exit $status
